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
    imported = {result for name, result in now.items() if name.startswith("an import")}
    assert all(result.startswith("status 4") for result in imported), imported
    assert len(imported) == 2
    assert "a chat of 15 MiB, through the gateway" in now
    assert now["SIGHUP while the model loads"] == "lives"
    assert now["poisoned modules, `.numba_config.yaml` in the folder"] == "nothing"
    assert now["`--kv-memory 900GB`"] == "1 line"
    assert "attack | before | now" in attacks_table(report).markdown()
