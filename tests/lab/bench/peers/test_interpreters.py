"""Interpreters that have a library, and its version there."""

import importlib.metadata
import sys
from pathlib import Path

from midfill_lab.bench.peers.interpreters import find_interpreter

NUMPY = importlib.metadata.version("numpy")


def test_this_one_is_found_where_it_has_the_module() -> None:
    assert find_interpreter(None, "numpy", "numpy") == (sys.executable, NUMPY)
    assert find_interpreter(None, "no-such-library", "no_such_library") is None


def test_the_one_that_is_named_is_the_only_one_asked(tmp_path: Path) -> None:
    assert find_interpreter(Path(sys.executable), "numpy", "numpy") == (sys.executable, NUMPY)
    assert find_interpreter(Path(sys.executable), "no-such-library", "numpy") is None
    assert find_interpreter(tmp_path / "python", "numpy", "numpy") is None
