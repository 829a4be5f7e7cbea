"""Every command that the documentation shows works: the real command line takes it; cheap ones run.

Commands in sentences leave arguments out, and are checked for the options that they name.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer.main
from doc_blocks import PAGES, ROOT, ShellCommand, all_blocks, shell_commands

from benchmarks.__main__ import COMMANDS as BENCHMARKS
from benchmarks.__main__ import make_app
from midfill.cli.app import app

MIDFILL = typer.main.get_command(app)
BENCHMARKS_APP = typer.main.get_command(make_app(*BENCHMARKS))
COMMANDS = [command for block in all_blocks("sh") for command in shell_commands(block)]
EXTRAS = {
    names: tomllib.loads((ROOT / file).read_text())["project"]["optional-dependencies"].keys()
    for names, file in (
        ((".", "midfill"), "pyproject.toml"),
        (("lab", "midfill-lab"), "lab/pyproject.toml"),
    )
}
IN_A_SENTENCE = re.compile(r"`((?:midfill|(?:\.venv/bin/)?python -m benchmarks) [^`]*)`")

RUN = {
    "midfill complete app.py:12:8 --method cake:budget=0.25,window=16",
    "midfill complete examples/client.py:8:10",
    "midfill complete src/app.py:42",
    "midfill eval compare base.json tuned.json",
    "midfill eval compare base.json tuned.json --pair prefix-only+healing=psm",
    "midfill eval show mine.json --docs page.md",
    "midfill generate def fibonacci(n):",
    "midfill methods",
    "midfill models",
}
"""The commands that are also run, each with the default model."""

PROGRAM = "".join(f"def scale_{n}(value):\n    return value * {n}\n" for n in range(30))
"""The text of the files that they name; line 42 ends a function."""


def named(*programs: str, or_not_run: bool = True) -> list[ShellCommand]:
    """Return the commands of some programs; with or without those that no test can run."""
    found = [command for command in COMMANDS if command.program in programs]
    return [command for command in found if or_not_run or not command.block.not_run]


def ours() -> list[ShellCommand]:
    """Return the commands of midfill and those of its benchmarks."""
    benchmarks = [one for one in named("python") if one.words[1:3] == ("-m", "benchmarks")]
    return [*named("midfill"), *benchmarks]


def leaf(words: Sequence[str]) -> tuple[object, str, list[str]]:
    """Return the command that words are, its name, and its arguments."""
    command, name, rest = MIDFILL, "midfill", list(words[1:])
    if words[1:3] == ("-m", "benchmarks"):
        command, name, rest = BENCHMARKS_APP, "python -m benchmarks", list(words[3:])
    while rest and rest[0] in getattr(command, "commands", {}):
        command, name = command.commands[rest[0]], f"{name} {rest[0]}"  # type: ignore[attr-defined]
        rest = rest[1:]
    return command, name, rest


@pytest.mark.parametrize("command", ours(), ids=str)
def test_the_command_line_takes_it(
    command: ShellCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()  # commands check that the folders exist in which they will write
    monkeypatch.chdir(tmp_path)
    found, name, arguments = leaf(command.words)
    alone = getattr(found, "invoke_without_command", True)
    assert alone, f"'{name}' is a group; which command is meant?"
    found.make_context(name, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_have_the_options_that_they_name(page: Path) -> None:
    for number, part in enumerate(page.read_text("utf-8").split("```")):
        for text in IN_A_SENTENCE.findall(part) if number % 2 == 0 else ():
            found, name, arguments = leaf(tuple(text.split()))
            is_group = name in ("midfill", "python -m benchmarks")
            assert not is_group or arguments[:1] == ["--version"], f"no such command: {text}"
            options = {"--help"}
            for parameter in found.params:  # type: ignore[attr-defined]
                options |= {*parameter.opts, *parameter.secondary_opts}
            used = {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}
            assert used <= options, f"{name} has no {used - options}: {text}"


def test_every_command_is_mentioned() -> None:
    text = " ".join(page.read_text("utf-8") for page in PAGES)

    def leaves(command: object, path: str) -> Iterator[str]:
        subcommands = getattr(command, "commands", None)
        if not subcommands:
            yield path
        for name, sub in (subcommands or {}).items():
            yield from leaves(sub, f"{path} {name}")

    every = [
        *leaves(MIDFILL, "midfill"),
        *leaves(BENCHMARKS_APP, "python -m benchmarks"),
    ]
    for command in every:
        assert command in text, f"no page says what '{command}' is for"


@pytest.mark.parametrize("command", named("make"), ids=str)
def test_make_knows_the_target(command: ShellCommand) -> None:
    dry_run = ["make", "--dry-run", "--no-print-directory", *command.words[1:]]
    subprocess.run(dry_run, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", named("pip", or_not_run=False), ids=str)
def test_extras_to_install_exist(command: ShellCommand) -> None:
    installed = [re.fullmatch(r"([\w.-]+?)(?:\[(.+)\])?", word) for word in command.words]
    own = [
        (known, found[2])
        for names, known in EXTRAS.items()
        for found in installed
        if found and found[1] in names
    ]
    assert own, f"installs nothing of midfill: {command}"
    for known, extras in own:
        assert set(filter(None, (extras or "").split(","))) <= known, f"no extra {extras}"


@pytest.mark.parametrize("command", named("python", "pytest", or_not_run=False), ids=str)
def test_files_to_run_exist_and_compile(command: ShellCommand) -> None:
    files = [ROOT / word for word in command.words[1:] if word.endswith(".py")]
    if command in ours():
        return
    assert files, f"runs no file: {command}"
    for file in files:
        ast.parse(file.read_text("utf-8"))


def test_every_command_of_every_block_is_one_that_tests_know() -> None:
    known = {"midfill", "make", "pip", "python", "pytest", "pre-commit", "curl"}
    for command in COMMANDS:
        assert command.program in known or command.block.not_run, (
            f"{command}: no test checks it; say why, in the paragraph after the block:"
            " *Not run by the tests: REASON.*"
        )


def text_of(command: ShellCommand) -> str:
    return " ".join(("midfill", *command.words[1:]))


def cheap() -> list[ShellCommand]:
    first = {text_of(command): command for command in reversed(named("midfill"))}
    return [command for text, command in sorted(first.items()) if text in RUN]


def test_the_commands_to_run_are_found() -> None:
    assert {text_of(command) for command in cheap()} == RUN


def midfill(folder: Path, *arguments: str | Path) -> str:
    """Run a command in a folder; return what it prints."""
    command = [sys.executable, "-m", "midfill", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def files(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "src").mkdir()
    for name in ("app.py", "src/app.py"):
        (folder / name).write_text(PROGRAM)
    shutil.copytree(ROOT / "examples", folder / "examples")
    model = ("--model", tiny_folder, "--adapter", "none", "--threads", "1")
    holes = (
        "--files",
        ROOT / "tests/docs",
        "--tasks",
        "subtoken",
        "--limit",
        "2",
        "--max-tokens",
        "4",
    )
    limits = ("--conditions", "psm,prefix-only+healing", "--context-characters", "200,100")
    midfill(folder, "eval", "infilling", *model, *holes, *limits, "--json", "mine.json")
    for name in ("base.json", "tuned.json"):
        shutil.copy(folder / "mine.json", folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("command", cheap(), ids=str)
def test_cheap_commands_run(command: ShellCommand, files: Path) -> None:
    assert midfill(files, *command.words[1:]).strip()
