"""The counts of rows in models with states: of real engines, beside blocks and plain KV."""

from pathlib import Path

import numpy as np
from tiny_checkpoints import VOCAB

from benchmarks.state_rows import BLOCK, SessionRows, measure_state_rows, state_rows_table
from midfill.models.checkpoints.opening import open_checkpoint


def test_blocks_count_whole_ones_only() -> None:
    session = SessionRows(
        kind="made up", tokens=[100, BLOCK + 10, 1200, 50], plain=[3, 5, 144, 51], states={}
    )
    assert session.blocks == [100, 10, 1200 - 2 * BLOCK, 50]


def test_a_session_with_snapshots_computes_little_more_than_with_plain_kv(
    tiny_folder: Path,
) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    assert checkpoint.config.vocab == VOCAB
    report = measure_state_rows(checkpoint, rounds=12, states=(8,), kinds=("typing",))
    (session,) = report.sessions
    assert len(session.tokens) == len(session.plain) == len(session.states[8]) == 12
    assert session.blocks[0] == session.tokens[0]
    assert session.tokens[0] <= session.plain[0] == session.states[8][0] <= session.tokens[0] + 9
    more = np.array(session.states[8]) - np.array(session.plain)
    assert more.min() >= 0
    assert np.median(more[1:]) <= 64
    (row,) = state_rows_table(report).rows
    assert row["session"] == "typing"
    assert row["8 states, at most 64 more"].endswith("%")
