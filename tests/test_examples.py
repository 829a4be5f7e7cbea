"""The examples run as their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import start

from midfill.models.checkpoints.model_store import DEFAULT_MODEL

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


def run(name: str, **environment: str) -> str:
    """Run an example to its end and return what it printed."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def test_the_trace_shows_what_the_second_request_saves() -> None:
    first, second = run("trace_request.py").split("request 1:")
    for kind in ("layout", "prompt", "plan", "batch", "tokens"):
        assert f"  {kind}" in first
        assert f"  {kind}" in second
    cached, prompt = map(int, re.findall(r"usage  (\d+) of (\d+)", second)[0])
    assert 0 < prompt - cached < 10
    admitted = int(re.findall(r"admit: \[Chunk\(sequence_id=1, tokens=(\d+)\)", second)[0])
    assert admitted == prompt - cached


def test_the_client_prints_an_answer() -> None:
    with start(DEFAULT_MODEL, "--kv-memory", "512MB") as server:
        assert run("client.py", OPENAI_BASE_URL=f"{server.url}/v1").strip() == "th * height"


@pytest.mark.timeout(900)
def test_training_writes_an_adapter(tmp_path: Path) -> None:
    text = (EXAMPLES / "train_adapter.py").read_text("utf-8")
    assert "tokens=20_000" in text
    shorter = tmp_path / "train_adapter.py"
    shorter.write_text(text.replace("tokens=20_000", "tokens=2_048"))
    documents = EXAMPLES.parent / "src/midfill/infill"
    subprocess.run([sys.executable, shorter, documents, tmp_path / "out"], check=True)
    assert (tmp_path / "out/adapter/midfill.json").is_file()
