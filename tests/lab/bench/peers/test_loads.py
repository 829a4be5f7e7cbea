"""The loads of a comparison: what is sent and what is made of the answers."""

from collections.abc import Sequence

import msgspec
import pytest
from peer_reports import SMALL_LOADS

from midfill.errors import MidfillError
from midfill_lab.bench.clients import Measurement
from midfill_lab.bench.documents import Prompts
from midfill_lab.bench.peers.loads import (
    ALL_LAYOUTS,
    LAID_OUT,
    loads_for,
    rate_together,
)
from midfill_lab.bench.peers.servers import ComparedModel


def test_only_the_loads_that_are_asked_for(folder_model: ComparedModel) -> None:
    fewer = msgspec.structs.replace(SMALL_LOADS, loads=("rounds", "prefill"))
    loads = loads_for(fewer, Prompts(folder_model.checkpoint.tokenizer, seed=0), ALL_LAYOUTS)
    assert [load.kind for load in loads] == ["prefill", "prefill", "rounds"]


def test_a_peer_is_not_sent_prefix_and_suffix(folder_model: ComparedModel) -> None:
    prompts = Prompts(folder_model.checkpoint.tokenizer, seed=0)
    some = msgspec.structs.replace(SMALL_LOADS, loads=("prefill", "keystroke", "rounds"))
    peer = loads_for(some, prompts, LAID_OUT)
    own = loads_for(some, prompts, ALL_LAYOUTS)
    for theirs, ours in zip(peer, own, strict=True):
        assert (theirs.prompt_tokens < ours.prompt_tokens) == (ours.kind != "prefill")


def test_streams_count_while_all_of_them_are_written() -> None:
    early = answer([0.0, 1.0, 2.0, 3.0, 4.0], 5)
    late = answer([1.0, 2.0, 3.0, 4.0, 5.0], 5)
    assert rate_together([early]) == 1.0
    assert rate_together([early, late]) == 2.0  # from 1 to 4: three tokens each
    assert rate_together([answer([0.0, 1.0, 2.0], 9)]) == 4.0  # four tokens a message
    with pytest.raises(MidfillError, match="not decoded at the same time"):
        rate_together([early, answer([9.0, 10.0, 11.0], 3)])


def answer(arrivals: Sequence[float], tokens: int) -> Measurement:
    return Measurement(0.1, 1.0, 16, 0, tokens, "", tuple(arrivals))
