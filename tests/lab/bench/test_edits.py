"""A session replayed against a model computes less under the planner."""

import asyncio
from pathlib import Path

import pytest
from rich.console import Console
from tiny_checkpoints import write_tiny

from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill_lab.bench.clients import InProcessClient
from midfill_lab.bench.edits import edits_table, replay_edits


def check_replay(model: str, rounds: int) -> None:
    client = InProcessClient(model, None, None, Console(stderr=True))
    try:
        report = asyncio.run(
            replay_edits(client, rounds=rounds, output_tokens=2, names=("planner", "psm"))
        )
    finally:
        client.close()
    planner, psm = report.layouts["planner"], report.layouts["psm"]
    assert planner.requests == psm.requests == rounds
    assert planner.computed_tokens < psm.computed_tokens <= psm.prompt_tokens
    assert 0 < planner.ttft_seconds <= planner.ttft_p90_seconds <= planner.wall_seconds
    assert [row["layout"] for row in edits_table(report).rows] == ["planner", "psm"]


def test_a_replay_against_a_model_computes_less_under_the_planner(tmp_path: Path) -> None:
    check_replay(str(write_tiny("llama", tmp_path, max_position_embeddings=16_384)), rounds=4)


@pytest.mark.slow
@pytest.mark.real_model
def test_a_replay_against_the_default_model_does_too() -> None:
    check_replay(DEFAULT_MODEL, rounds=8)
