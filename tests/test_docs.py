"""README.md, CONTRIBUTING.md and docs/ are true: what they name exists, options too."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from midfill.cli.app import app

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "examples")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

IN_A_BLOCK = re.compile(r"^(?:\.venv/bin/)?(midfill [^#\n]*)", re.MULTILINE)
IN_A_SENTENCE = re.compile(r"`(midfill [^`]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
SOURCE_FILE = re.compile(r"`([\w/.-]*\w\.py)`")


def commands(page: Path) -> Iterator[str]:
    for number, part in enumerate(page.read_text("utf-8").split("```")):
        yield from (IN_A_BLOCK if number % 2 else IN_A_SENTENCE).findall(part)


def options_of(words: list[str]) -> tuple[str, set[str]]:
    """The command that words begin with, and the options it has."""
    command, name = typer.main.get_command(app), "midfill"
    for word in words:
        found = getattr(command, "commands", {}).get(word)
        if found is None:
            break
        command, name = found, f"{name} {word}"
    if getattr(command, "commands", None) and name != "midfill":
        raise AssertionError(f"'{name}' is a group of commands; which one is meant?")
    options = {"--help"}
    for parameter in command.params:
        options |= {*parameter.opts, *parameter.secondary_opts}
    return name, options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_they_are_shown_with(page: Path) -> None:
    for text in commands(page):
        _, *words = text.split()
        name, options = options_of(words)
        assert name != "midfill", f"no such command: {text}"
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options, f"{name} has no {used - options}: {text}"


def test_commands_are_found_in_the_pages() -> None:
    found = {page.name: len(list(commands(page))) for page in PAGES}
    assert found["README.md"] >= 10
    assert found["evaluation.md"] >= 7


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page: Path) -> None:
    files = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for name in SOURCE_FILE.findall(page.read_text("utf-8")):
        if "NAME" not in name:  # a file to be written
            assert any(file.endswith(f"/{name}") for file in files), f"{page.name}: no {name}"


def test_every_command_is_mentioned() -> None:
    text = " ".join(page.read_text("utf-8") for page in PAGES)

    def leaves(command: object, path: str) -> Iterator[str]:
        subcommands = getattr(command, "commands", None)
        if not subcommands:
            yield path
        for name, sub in (subcommands or {}).items():
            yield from leaves(sub, f"{path} {name}")

    for command in leaves(typer.main.get_command(app), "midfill"):
        assert command in text, f"no page says what '{command}' is for"
