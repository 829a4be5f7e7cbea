"""Which models for code are named, and where."""

from pathlib import Path

import pytest

from midfill.cli import serve
from midfill.cli.code_models import CODE_MODELS, code_models
from midfill.cli.pull import models
from midfill.system import bandwidth, machine


def sizes(bytes_per_second: float, memory: float, *, usable: bool = False) -> list[str]:
    lines = code_models(bytes_per_second, memory, usable=usable)
    return [line.split("-Coder-")[1].split()[0] for line in lines]


def test_those_that_fit_into_memory_are_named() -> None:
    assert sizes(1e11, 1e11) == ["0.5B", "1.5B", "7B"]
    assert sizes(1e11, 4e9) == ["0.5B", "1.5B"]
    assert sizes(1e11, 1e8) == []


def test_those_that_are_too_slow_for_typing_are_left_out_but_for_the_smallest() -> None:
    assert sizes(2e10, 1e11, usable=True) == ["0.5B", "1.5B"]
    assert sizes(1e9, 1e11, usable=True) == ["0.5B"]


def test_a_token_reads_all_weights_once() -> None:
    (line, *_) = code_models(bytes_per_second=100 * 0.65 * CODE_MODELS[0].read, memory=1e11)
    assert line.split("#")[0].strip() == "midfill serve Qwen/Qwen2.5-Coder-0.5B --weights q4"
    assert line.split("#")[1].startswith(" 100 tokens/s")


def test_commands_name_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "available_memory", lambda: 10**11)
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda threads: 2e10)
    models()
    assert capsys.readouterr().out.count("midfill serve Qwen/") == 3
    serve._show_code_models()
    shown = capsys.readouterr().out
    assert shown.startswith("This model is a demonstration")
    assert "20 GB/s" in shown
    assert shown.count("midfill serve Qwen/") == 2
