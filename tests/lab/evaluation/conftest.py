"""Fixtures for the evaluation tests: a few problems in HumanEval-Infilling's file format."""

import gzip
import json
from pathlib import Path

import pytest

_SUM = (
    "def total(values):\n",
    ["    result = 0\n", "    for value in values:\n", "        result += value\n"],
    "    return result\n",
    "def check(candidate):\n    assert candidate([1, 2, 3]) == 6\n    assert candidate([]) == 0\n",
)
_FIRST = (
    "def first(text):\n",
    ["    if not text:\n", "        return None\n"],
    "    return text[0]\n",
    "def check(candidate):\n    assert candidate('ab') == 'a'\n    assert candidate('') is None\n",
)


def _records() -> list[dict[str, str]]:
    records = []
    for number, (head, lines, tail, test) in enumerate((_SUM, _FIRST)):
        for place, line in enumerate(lines):
            records.append(
                {
                    "task_id": f"SingleLineInfilling/HumanEval/{number}/L{place}",
                    "entry_point": head[4 : head.index("(")],
                    "prompt": head + "".join(lines[:place]),
                    "suffix": "".join(lines[place + 1 :]) + tail,
                    "canonical_solution": line,
                    "test": test,
                }
            )
    return records


@pytest.fixture(scope="session")
def records() -> list[dict[str, str]]:
    """The problems as records of the files."""
    return _records()


@pytest.fixture(scope="session")
def humaneval(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, str]]) -> Path:
    """A folder with the three files of the data set, each with these problems."""
    folder = tmp_path_factory.mktemp("humaneval")
    for kind in ("SingleLine", "MultiLine", "RandomSpan"):
        lines = "".join(json.dumps(record).replace("SingleLine", kind) + "\n" for record in records)
        path = folder / f"HumanEval-{kind}Infilling.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    return folder
