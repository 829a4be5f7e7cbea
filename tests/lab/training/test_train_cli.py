"""``midfill train`` as users run it, from a tiny corpus to an adapter that infills."""

import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from midfill.cli import main
from midfill.frontend.sampling import SamplingParams
from midfill.llm import LLM

for _library in ("torch", "accelerate", "peft"):
    pytest.importorskip(_library)

FIM = "<fim_prefix>,<fim_suffix>,<fim_middle>"
RECIPE = """
tokens_per_step = 400
row_tokens = 200
rank = 4
precision = "fp32"

[data]
prefix_characters = [5, 40]
suffix_characters = [5, 30]
long_share = 0.0
"""

Midfill = Callable[..., tuple[int, str, str]]


@pytest.fixture
def midfill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Midfill:
    """A function that runs the entry point here; returns status, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["midfill", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        assert isinstance(status, int)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_from_documents_to_an_adapter_that_infills(
    midfill: Midfill, tiny_folder: Path, corpus: Path, recipe_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train = ("train", "fim", corpus, "-o", out, "--model", tiny_folder, "--fim-tokens", FIM)
    options = ("--recipe", recipe_file, "--tokens", 4000, "--threads", 1, "--merge", tmp_path / "m")
    status, _, errors = midfill(*train, *options)
    assert status == 0, errors
    for line in (
        "documents: 12 files",
        "text: in fragments",
        "training: LoRA of rank 4",
        "device: 1 CPU threads, fp32",
        "length: 4,000 tokens, 10 steps",
    ):
        assert line in errors
    assert re.search(r"step 3 of 10: loss \d\.\d+, \d+ tokens/s, 0:00:\d\d left", errors)
    assert f"adapter: {out / 'adapter'}" in errors

    record = json.loads((out / "adapter" / "midfill.json").read_text())
    assert record["training"]["steps"] == 10
    assert record["training"]["last_loss"] < record["training"]["first_loss"]
    assert record["data"]["documents"] == 12
    assert record["data"]["licences"] == {"MIT": 12}
    assert record["data"]["sources"] == "package"
    manifest = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert len(manifest) == 12
    assert (out / "loss.png").is_file()

    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    ask = "def function(first, sec", "):\n    return first\n"
    for model, adapter in ((tiny_folder, out / "adapter"), (tmp_path / "m", None)):
        with LLM(str(model), adapter=adapter, backend="torch") as llm:
            assert llm.fim_format is not None
            result = llm.infill(*ask, sampling)
            assert result.layout is not None
            assert result.layout.sentinels
            assert result.answers[0].token_ids

    # The same command again finds all of it done; another recipe must go elsewhere.
    before = (out / "adapter" / "adapter_model.safetensors").read_bytes()
    status, _, errors = midfill(*train, *options)
    assert status == 0, errors
    assert (out / "adapter" / "adapter_model.safetensors").read_bytes() == before
    assert json.loads((out / "adapter" / "midfill.json").read_text())["data"] == record["data"]
    status, _, errors = midfill(*train, *options, "--seed", 3)
    assert status == 1
    assert "holds another run (seed 0 there, 3 now)" in errors


def test_a_stopped_run_says_how_to_continue(
    midfill: Midfill, tiny_folder: Path, corpus: Path, recipe_file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "out" / "loss.jsonl"

    def stop_after_three_steps() -> None:
        while not log.is_file() or log.read_text().count("\n") < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_after_three_steps, daemon=True)
    stopper.start()
    command = ("train", "fim", corpus, "-o", tmp_path / "out", "-m", tiny_folder)
    options = ("--recipe", recipe_file, "--tokens", 4_000_000, "--threads", 1)
    status, _, errors = midfill(*command, *options)
    assert status == 130
    assert re.search(r"stopped after \d+ of 10000 steps; the same command continues", errors)
    assert list((tmp_path / "out" / "checkpoints").iterdir())
    assert not (tmp_path / "out" / "adapter").exists()


def test_data_shows_what_training_would_read(
    midfill: Midfill,
    tiny_folder: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "LICENSE").write_text("MIT License")
    source = (corpus / "package" / "module_1.py").read_bytes()
    (tmp_path / "good.py").write_bytes(source.replace(b"a", b"x").replace(b"e", b"q"))
    (tmp_path / "binary.py").write_bytes(b"\0" * 1000)
    (tmp_path / "latin.py").write_bytes(source + b"\xe9")
    monkeypatch.setenv("COLUMNS", "120")
    status, output, _ = midfill(
        "train", "data", corpus, tmp_path, "-m", tiny_folder, "--fim-tokens", FIM, "--examples", 2
    )
    assert status == 0
    assert "15 read (all of them), 13 kept" in output
    assert "binary 1" in output
    assert "encoding 1" in output
    assert "MIT 13" in output
    assert output.count("<fim_middle>") >= 2
    assert "│" in output
    assert re.search(r"speed +[\d,]+ tokens/s", output)


def test_a_missing_source_is_reported_before_the_model_is_opened(
    midfill: Midfill, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for model in (tiny_folder, "./none"):
        for arguments in (("nowhere",), (tiny_folder / "config.json", "--protect", "nowhere")):
            asked = ("train", "data", *arguments, "-m", model, "--fim-tokens", "<a>,<b>,<c>")
            assert midfill(*asked) == (1, "", "midfill: nowhere: no such file or folder\n")


BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "no such folder": (("nowhere",), "nowhere: no such file or folder"),
    "no such folder and no model": (("nowhere", "-m", "./none"), "nowhere: no such file or folder"),
    "an empty folder": (("empty",), "no documents: the folders hold no .py file"),
    "binary files": (("binary",), "can be trained on (binary: 1)"),
    "wrong encodings": (("latin",), "can be trained on (encoding: 1)"),
    "files shorter than a hole": (("short",), "can be trained on (too short: 1)"),
    "documents without licence": (("unlicensed",), "can be trained on (licence: 1)"),
    "broken records": (("broken.jsonl",), "broken.jsonl: line 1 is not JSON"),
    "unknown tokens": (("unlicensed", "--fim-tokens", "<a>,<b>,<c>"), "'<a>' is not a special"),
    "a missing recipe": (("unlicensed", "--recipe", "none.toml"), "none.toml: can't be read"),
    "a missing model": (("unlicensed", "-m", "./none"), "none"),
    "a missing evaluation": (("unlicensed", "--protect", "none"), "none: no such file or folder"),
    "a checkpoint that is none": (
        ("unlicensed", "--any-licence", "--start-from", "empty"),
        "empty: not a training checkpoint",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_reported_in_one_line_and_leaves_nothing(
    case: str,
    midfill: Midfill,
    tiny_folder: Path,
    corpus: Path,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (corpus / "package" / "module_1.py").read_bytes()
    for name, content in (
        ("binary", b"\0" * 1000),
        ("latin", source + b"\xe9"),
        ("short", b"x = 1\n"),
        ("unlicensed", source),
    ):
        Path(name).mkdir()
        (Path(name) / "LICENSE").write_text("" if name == "unlicensed" else "MIT License")
        (Path(name) / "a.py").write_bytes(content)
    Path("empty").mkdir()
    Path("broken.jsonl").write_text("{\n")
    arguments, message = BAD[case]
    given = [str(each) for each in arguments]
    if "-m" not in given:
        given += ["-m", str(tiny_folder)]
    if "--recipe" not in given:
        given += ["--recipe", str(recipe_file)]
    status, output, errors = midfill("train", "fim", *given, "-o", "out", "--threads", 1)
    assert status == 1
    assert output == ""
    lines = [line for line in errors.splitlines() if line.startswith("midfill: ")]
    assert len(lines) == 1
    assert message in errors.splitlines()[-1]
    assert not Path("out").exists()
