"""The attacks that docs/reliability.md lists reach a server, and hurt it no more."""

import asyncio
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from benchmarks.reliability.attacks import attacks_table, bodies, measure_attacks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_attacks_are_refused(tmp_path: Path) -> None:
    model = str(write_tiny("llama", tmp_path / "tiny-llama", max_position_embeddings=4096))
    report = asyncio.run(measure_attacks(model))
    now = {name: result for name, _, result in report.rows}
    refused = [now[each.name] for each in bodies() if "MiB" in each.name]
    assert refused, now
    assert not [result for result in refused if result.startswith(("status 5", "status 0"))], now
    assert now["SIGHUP while the model loads"] == "lives"
    assert now["poisoned modules, `.numba_config.yaml` in the folder"] == "nothing"
    assert now["`--kv-memory 900GB`"] == "1 line"
    assert "attack | before | now" in attacks_table(report).markdown()
