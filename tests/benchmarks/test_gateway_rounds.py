"""bench gateway-rounds: EFIM's load on a server, with and without a gateway in front of it."""

import pytest

from benchmarks.gateway import run_stub_process
from benchmarks.gateway_rounds import (
    EFIM,
    GATEWAY,
    PSM,
    UNHEALED,
    gateway_rounds_table,
    measure_gateway_rounds,
)
from midfill_lab.bench.rounds import RoundsOptions


@pytest.mark.timeout(120)
def test_every_way_answers_every_request() -> None:
    options = RoundsOptions(users=2, rounds=2, output_tokens=2, repeats=1)
    sentinels = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    with run_stub_process() as server:
        report = measure_gateway_rounds(server, sentinels, options)
    assert report.kind == "vllm"
    assert list(report.ways) == [PSM, EFIM, GATEWAY, UNHEALED]
    for result in report.ways.values():
        assert result.wall_seconds >= 0.2  # two rounds of 100 ms
        assert result.computed_tokens > 0
    assert report.ways[UNHEALED].asked_again == 0
    rows = gateway_rounds_table(report).rows
    assert [row["asked again"] == "" for row in rows] == [True, True, False, False]
