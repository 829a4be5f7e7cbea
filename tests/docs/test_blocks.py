"""The documentation's fenced blocks: each is of a kind that a test checks, or says why not."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from doc_blocks import Block, all_blocks, blocks_of, has_commands, shell_commands

LANGUAGES = {"sh", "python", "json", "toml", "yaml", "js", "lua", "vim", "elisp", "text"}
"""sh is checked by test_commands and tests/server/test_documented_requests, python by
test_python_blocks; text is what programs print, and drawings."""


def test_all_blocks_are_found() -> None:
    page = "a\n```sh\nmidfill models  # all\n```\n\n*Not run by the tests: it is long.*\n"
    page += "\n- b\n\n    ```python\n    x = 1\n    ```\n"
    shell, python = blocks_of(page, "page.md")
    assert (shell.line, shell.language, shell.not_run) == (2, "sh", "it is long")
    assert [command.words for command in shell_commands(shell)] == [("midfill", "models")]
    assert (python.line, python.text, python.not_run) == (10, "x = 1\n", "")
    fences = sum(
        len(re.findall(r"^ *```", page.read_text("utf-8"), re.M))
        for page in {Path(block.page) for block in all_blocks()}
    )
    assert fences == 2 * len(all_blocks())


@pytest.mark.parametrize("block", all_blocks(), ids=str)
def test_its_language_says_how_it_is_checked(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.language == "text":
        assert not has_commands(block.text), "commands stand in blocks of sh"


@pytest.mark.parametrize("block", all_blocks("sh"), ids=str)
def test_a_shell_can_read_it(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}


@pytest.mark.parametrize("block", all_blocks(*PARSERS), ids=str)
def test_data_is_well_formed(block: Block) -> None:
    assert PARSERS[block.language](block.text)


READ_ELISP = '(with-temp-buffer (insert-file "{file}") (emacs-lisp-mode) (check-parens))'
PROGRAMS = {
    "js": ("node", "--check", "{file}"),
    "lua": ("luac", "-p", "{file}"),
    "vim": ("vim", "-es", "-u", "NONE", "-c", "source {file}", "-c", "qall!"),
    "elisp": ("emacs", "--batch", "--eval", READ_ELISP),
}
"""What reads a block in the language's own way, and ends with an error where it can't."""


@pytest.mark.parametrize("block", all_blocks(*PROGRAMS), ids=str)
def test_its_own_language_can_read_it(block: Block, tmp_path: Path) -> None:
    program, *arguments = PROGRAMS[block.language]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    file = tmp_path / f"block.{block.language}"
    file.write_text(block.text)
    command = [program, *(argument.format(file=file) for argument in arguments)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
