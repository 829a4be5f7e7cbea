"""CONTRIBUTING.md's recipes work: a sample of each addition, in the files that its row names."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sample_additions import ADDITIONS, KIND, NAME

ROOT = Path(__file__).parents[1]
ROWS = {
    row[0]: row[1:]
    for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()
    if len(row := [cell.strip() for cell in line.strip("|").split("|")]) == 5
    and row[0] not in ("to add", "---")
}
"""What is added -> where it is written, registered, tested and documented."""

PROGRAM = """
import json, sys, traceback
tiny, programs = sys.argv[1], json.load(sys.stdin)
found = {}
for what, program in programs.items():
    try:
        exec(program, {"tiny": tiny})
    except BaseException:
        found[what] = traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def failures(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What fails in a copy of the repository with all samples: addition -> traceback."""
    root = tmp_path_factory.mktemp("additions")
    for folder in ("src/midfill", "lab/src/midfill_lab", "benchmarks"):
        shutil.copytree(
            ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "built")
        )
    for addition in ADDITIONS.values():
        addition.write(root)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_folder)],
        input=json.dumps({what: addition.program for what, addition in ADDITIONS.items()}),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(root / place) for place in ("src", "lab/src", ".")),
        },
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_row_has_a_sample() -> None:
    assert set(ROWS) == {*ADDITIONS}


@pytest.mark.parametrize("what", ADDITIONS)
def test_a_sample_touches_what_its_row_names(what: str) -> None:
    written, registered, *_ = ROWS[what]
    named = {
        place.replace("KIND", f"{NAME}_kind" if what == "a kind of method" else KIND)
        for place in re.findall(r"`([^`]+\.py)`", written + registered)
    }
    touched = {
        name.replace(NAME, "NAME") if "_kind" not in name else name
        for name in ADDITIONS[what].touched
        if not name.endswith("__init__.py")
    }
    assert touched == named


@pytest.mark.parametrize("what", ADDITIONS)
def test_a_sample_works(what: str, failures: dict[str, str]) -> None:
    assert failures.get(what, "") == ""
