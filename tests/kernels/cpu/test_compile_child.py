"""Compilation in a child: it leaves nothing here, and whatever happens to it changes no answer."""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midfill.kernels.cpu import compile_child, linking
from midfill.kernels.cpu.calls import compile_side_by_side
from midfill.kernels.cpu.decoder import forward
from midfill.kernels.cpu.linear import gated_linear, linear
from midfill.system.python_child import python_command, python_environment

MODULE = """
import os
import time
from pathlib import Path

from midfill.kernels.cpu.compiled import CompiledCache
from midfill.kernels.cpu.jit import kernel

if os.environ.get("IN_CHILD") == "dies":
    os._exit(7)
if os.environ.get("IN_CHILD") == "hangs":
    time.sleep(600)


@kernel
def doubled(x):
    return x + x


@kernel
def halved(x):
    return x / 2


for each in (doubled, halved):
    each._cache = CompiledCache(each.py_func, Path(__file__).parent / FOLDER)
    each.in_child = True
"""

Load = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return what loads a module with a kernel, anew each time, as a process of its own would."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)

    def load(folder: str = "kernels") -> Any:
        (tmp_path / "sample_kernel.py").write_text(MODULE.replace("FOLDER", repr(folder)))
        monkeypatch.delitem(sys.modules, "sample_kernel", raising=False)
        return importlib.import_module("sample_kernel").doubled

    return load


def compiled_here(function: Any) -> int:
    """Return how many compilations this process has made itself."""
    return sum(function.stats.cache_misses.values())


def test_a_child_compiles_and_this_process_loads(load: Load) -> None:
    doubled = load()
    assert doubled(np.float64(1.5)) == 3.0
    assert compiled_here(doubled) == 0
    assert sum(doubled.stats.cache_hits.values()) == 1


def test_each_group_is_compiled_by_a_child_of_its_own(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[list[list[str]]] = []

    def compile_in_children(wanted: list[list[Any]]) -> None:
        groups.append([[function.__name__ for function, _ in calls] for calls in wanted])
        compile_child.compile_in_children(wanted)

    monkeypatch.setattr(linking, "compile_in_children", compile_in_children)
    doubled = load()
    halved = sys.modules["sample_kernel"].halved
    compile_side_by_side([(doubled, (1.5,)), (halved, (1.5,))], [(doubled, (1,))])
    compile_side_by_side([(doubled, (1.5,))], [(halved, (1.5,)), (halved, (1,))])
    assert groups == [[["doubled", "halved"], ["doubled"]], [["halved"]]]
    assert compiled_here(doubled) == compiled_here(halved) == 0
    assert (doubled(1), doubled(1.5), halved(1)) == (2, 3.0, 0.5)


def test_no_child_is_started_for_what_is_compiled(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Any] = []
    monkeypatch.setattr(linking, "compile_in_children", lambda *task: children.append(task))
    for started in (1, 1):  # the first one compiles by itself, as after a child that failed
        assert load()(np.float64(1.5)) == 3.0
        assert len(children) == started


def test_no_child_is_started_where_nothing_can_be_stored(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Any] = []
    monkeypatch.setattr(linking, "compile_in_children", lambda *task: children.append(task))
    (tmp_path / "file").touch()
    doubled = load("file/kernels")
    assert doubled(np.float64(1.5)) == 3.0
    assert compiled_here(doubled) == 1
    assert not children


def test_where_the_child_dies_this_process_compiles(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    doubled = load()
    monkeypatch.setenv("IN_CHILD", "dies")
    assert doubled(np.float64(1.5)) == 3.0
    assert compiled_here(doubled) == 1
    assert "ended with status 7" in caplog.text


def test_where_no_child_can_be_started_this_process_compiles(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    doubled = load()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert doubled(np.float64(1.5)) == 3.0
    assert compiled_here(doubled) == 1
    assert "/no/such/python" in caplog.text


def test_a_child_ends_with_what_started_it(load: Load) -> None:
    doubled = load()
    task = pickle.dumps([("sample_kernel", "doubled", (doubled.typeof_pyval(1.5),))])
    with subprocess.Popen(
        python_command("-m", "midfill.kernels.cpu.compile_child"),
        env=python_environment(os.environ | {"IN_CHILD": "hangs"}),
        stdin=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        child.stdin.write(task)
        child.stdin.close()
        assert child.wait(timeout=60) == 1


@pytest.mark.parametrize("kernel", [forward, linear, gated_linear])
def test_what_takes_long_is_compiled_by_a_child(kernel: Any) -> None:
    assert kernel.in_child
