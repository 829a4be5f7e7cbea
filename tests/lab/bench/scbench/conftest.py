"""Made-up texts in place of packages', a tokenizer of words, and a tiny model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny_checkpoints import write_tiny

from midfill_lab.bench.scbench.packages import Function, PackageTexts, Passage
from midfill_lab.bench.scbench.samples import SampleMaker

if TYPE_CHECKING:
    from midfill_lab.bench.scbench.session import SharedContextSession

VERBS = ("Count", "Sort", "Merge", "Split", "Print", "Close", "Open", "Move", "Drop", "Fill")
THINGS = ("rows", "files", "nodes", "edges", "trees", "pages", "words", "keys", "steps", "slots")


@pytest.fixture(scope="session")
def texts() -> PackageTexts:
    pairs = [(verb, thing, i) for i in range(6) for verb in VERBS for thing in THINGS]
    return PackageTexts(
        tuple(
            Function(
                f"{verb} the {thing} of group {i}.",
                f"def {verb.lower()}_{thing}_{i}(items):\n    kept = items[{i}:]\n"
                f"    return {verb.lower()}(kept, {thing!r})",
            )
            for verb, thing, i in pairs
        ),
        tuple(
            Passage(f"{verb} {thing} when asked {i} times.", f"The {thing} must exist by then.")
            for verb, thing, i in pairs
        ),
        tuple(f"{verb} all {thing} before step {i} begins, or wait." for verb, thing, i in pairs),
        "made-up packages 1.0",
    )


class Words:
    """A tokenizer whose tokens are words, spaces and punctuation."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in re.findall(r"\w+|\W", text)]

    def decode(self, tokens: tuple[int, ...]) -> str:
        words = list(self._ids)
        return "".join(words[token] for token in tokens)


@pytest.fixture(scope="session")
def words() -> Words:
    return Words()


@pytest.fixture(scope="session")
def maker(texts: PackageTexts, words: Words) -> SampleMaker:
    return SampleMaker(words.encode, words.encode, texts, length=1500, turns=4, seed=0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny") / "long"
    return str(write_tiny("llama", folder, max_position_embeddings=4096))


@pytest.fixture(scope="session")
def session(tiny_model: str) -> Iterator["SharedContextSession"]:
    from midfill_lab.bench.scbench.session import SharedContextSession

    one = SharedContextSession(tiny_model, threads=1)
    yield one
    one.close()
