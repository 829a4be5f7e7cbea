"""The parsers under a few mutated inputs, and those that once showed a bug.

``make fuzz`` tries a million, guided by branches.
"""

import runpy
from pathlib import Path

import pytest
from fuzzing.mutation import mutated
from fuzzing.targets import TARGETS

REGRESSIONS = Path(__file__).parent / "regressions"
SLOW = {"lsp-frames": 20, "gguf": 100, "planner": 100}
INPUTS = 300

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_command_has_all_targets() -> None:
    inputs = runpy.run_path(str(Path(__file__).parent / "run.py"))["INPUTS"]
    assert set(inputs) == set(TARGETS)
    assert sum(inputs.values()) >= 10**6


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_whatever_they_become(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    for seed in seeds:
        target.run(seed)
    for number in range(SLOW.get(name, INPUTS)):
        target.run(mutated(seeds, target.words, target.max_bytes, number))


@pytest.mark.parametrize(
    "path", sorted(REGRESSIONS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_what_once_showed_a_bug(path: Path) -> None:
    TARGETS[path.parent.name].run(path.read_bytes())


@pytest.mark.parametrize("name", ["gguf", "model-folder", "tokenizer-folder", "gguf-tokenizer"])
def test_seeds_are_whole_models(name: str) -> None:
    """Else nothing behind the first check would be reached."""
    for seed in TARGETS[name].seeds():
        TARGETS[name].parse(seed)
