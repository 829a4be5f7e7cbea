"""Loads that would take too long are left out."""

import msgspec
from peer_reports import SMALL_LOADS

from midfill.lab.bench.peers.compared_model import ComparedModel
from midfill.lab.bench.peers.loads import LAID_OUT, loads_for
from midfill.lab.bench.peers.results import figure
from midfill.lab.bench.peers.run import reason_to_skip
from midfill.lab.bench.prompts import Prompts


def test_loads_that_would_take_too_long_are_left_out(folder_model: ComparedModel) -> None:
    some = msgspec.structs.replace(SMALL_LOADS, loads=("prefill", "decode"))
    loads = {
        load.name: load
        for load in loads_for(some, Prompts(folder_model.checkpoint.tokenizer, 0), LAID_OUT)
    }
    decode, long = loads["decode at 300, 3 streams"], loads["prefill of 9,000"]
    slow = [figure("prefill", "prefill of 200", "tokens/s", [9.0])]
    assert reason_to_skip(decode, 8192, slow, limit=100) is None
    reason = reason_to_skip(decode, 8192, slow, limit=99)
    assert reason == "its prompts would take about 100 s, more than the limit of 99 s"
    assert reason_to_skip(decode, 8192, [], limit=1) is None  # nothing to go by
    assert reason_to_skip(long, 9001, slow, limit=1) is None  # measures what others go by
