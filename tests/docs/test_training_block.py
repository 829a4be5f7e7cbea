"""The README's commands that teach a model to infill, run one after the other on a tiny model."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, ShellCommand, all_blocks, shell_commands
from running_server import start

FIM = "<fim_prefix>,<fim_suffix>,<fim_middle>"
SHORTER = {
    "train": ("--recipe", "recipe.toml", "--tokens", "1200", "--threads", "1", "--any-licence"),
    "eval": ("--limit", "2", "--max-tokens", "4", "--context-characters", "150,60"),
}
"""Options that are added, so that the commands take seconds."""

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

pytestmark = pytest.mark.slow


def commands() -> list[ShellCommand]:
    block = next(
        block
        for block in all_blocks("sh")
        if block.page == "README.md" and "midfill train fim" in block.text
    )
    return [command for command in shell_commands(block) if command.program == "midfill"]


def test_they_lead_from_files_to_an_adapter_that_is_served_and_measured(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for folder in ("src", "held-out"):
        shutil.copytree(ROOT / "src/midfill/infill", tmp_path / folder)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    names = {"MODEL": str(tiny_folder), "PRE,SUF,MID": FIM}
    seen = []
    for command in commands():
        subcommand, *arguments = [names.get(word, word) for word in command.words[1:]]
        seen.append(subcommand)
        if subcommand == "serve":
            model, option, adapter = arguments
            with start(model, option, str(tmp_path / adapter), "--kv-memory", "4MB") as server:
                body = {"prompt": "def f(", "suffix": "):\n", "max_tokens": 4, "model": ""}
                assert server.complete(**body)["choices"]
            continue
        subprocess.run(
            [sys.executable, "-m", "midfill", subcommand, *arguments, *SHORTER[subcommand]],
            cwd=tmp_path,
            check=True,
        )
    assert seen == ["train", "serve", "eval"]
