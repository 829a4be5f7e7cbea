"""No child that is a Python imports from the current folder; each kind is started beside poison."""

import ast
import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import midfill
from midfill.config import LogOptions, ModelOptions
from midfill.engine import messages
from midfill.engine.process.supervision import EngineProcess
from midfill.errors import MidfillError
from midfill.frontend.chat import TemplateProcess
from midfill.lsp.child_server import ChildServer
from midfill.system.pip import run_pip
from midfill.system.python_child import (
    libraries_start_python,
    python_command,
    python_environment,
)

SOURCES = Path(midfill.__file__).parent


def modules() -> dict[str, str]:
    """Return the texts of the modules of midfill, and of midfill-lab where it is installed."""
    lab = importlib.util.find_spec("midfill_lab")
    folders = [SOURCES, *map(Path, (lab and lab.submodule_search_locations) or ())]
    return {
        path.relative_to(folder.parent).as_posix().removeprefix("midfill/"): path.read_text("utf-8")
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }


MARK = "poisoned"
_LIBRARIES = (
    "numpy", "msgspec", "zmq", "jinja2", "tokenizers", "torch", "uvicorn", "fastapi", "typer",
    "midfill", "pip", "ray", "sitecustomize", "usercustomize",
)  # fmt: skip


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has a module of the name of each that Python or midfill imports.

    Each writes a file when it is run, and so does Numba where it takes the folder's settings.
    """
    folder = tmp_path / "opened project"
    folder.mkdir()
    poison = f"open({str(tmp_path / MARK)!r}, 'a').write(__file__ + '\\n')\n"
    for name in (*sys.stdlib_module_names, *_LIBRARIES):
        (folder / f"{name}.py").write_text(poison)
    (folder / ".numba_config.yaml").write_text(f"chrome_trace: {tmp_path / MARK}\n")
    monkeypatch.chdir(folder)
    # One entry is empty: the current folder, as after PYTHONPATH=$PYTHONPATH:/folder.
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{SOURCES.parent}{os.pathsep}.")
    return tmp_path / MARK


async def start_engine_process() -> None:
    process = EngineProcess.spawn()
    process.send(messages.Start("/no-such-model", ModelOptions(), LogOptions()))
    async with contextlib.aclosing(process.received()) as received:
        said = [message async for message in received]
    assert isinstance(said[-1], messages.Failed)  # after torch and all libraries are imported
    await process.close()


async def start_child_server() -> None:
    server = await ChildServer.start("/no-such-model")
    with pytest.raises(MidfillError, match="no-such-model"):
        await server.ready(lambda stage: None)
    await server.close()


def start_template() -> None:
    process = TemplateProcess()
    try:
        assert process.render("{{ messages[0] }}", {}, [{"role": "user"}])
    finally:
        process.close()


def start_pip() -> None:
    code, said, _ = run_pip(["--version"])
    assert (code, said[:3]) == (0, "pip")


def start_program() -> None:
    done = subprocess.run(python_command("-c", "import random"), env=python_environment())
    assert done.returncode == 0


def start_kernels() -> None:
    """Numba reads its settings when it is imported, and again before each compilation."""
    first = "from midfill.runners.cpu import runner"
    then = "from numba.core import config; config.reload_config(); assert not config.CHROME_TRACE"
    done = subprocess.run(python_command("-c", f"{first}; {then}"), env=python_environment())
    assert done.returncode == 0


def start_with_multiprocessing() -> None:
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    with libraries_start_python():
        process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "start",
    [
        start_engine_process, start_child_server, start_template, start_pip, start_program,
        start_kernels, start_with_multiprocessing,
    ],
)  # fmt: skip
def test_nothing_in_the_current_folder_is_run(poisoned: Path, start: Callable[[], object]) -> None:
    started = start()
    if asyncio.iscoroutine(started):
        asyncio.run(started)
    assert not poisoned.exists(), poisoned.read_text()


def test_the_command_line_as_a_module_imports_nothing_from_there_either(tmp_path: Path) -> None:
    """Of what Python itself imports before it, ``-P`` takes care: SECURITY.md says so."""
    for name in ("random", "numpy", "typer", "numba"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('poisoned')")
    environment = os.environ | {"PYTHONPATH": str(SOURCES.parent)}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "midfill", "serve", "/no-such-model"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "no-such-model" in done.stderr
    assert "poisoned" not in done.stderr


def test_folders_that_the_operator_names_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = os.pathsep.join(["", "src", ".", "/elsewhere", str(tmp_path), "./"])
    environment = python_environment({"PYTHONPATH": named, "A": "1"})
    kept = [str(tmp_path / "src"), "/elsewhere", str(tmp_path)]
    assert environment == {"A": "1", "PYTHONPATH": os.pathsep.join(kept), "PYTHONSAFEPATH": "1"}
    assert "PYTHONPATH" not in python_environment({"PYTHONPATH": ""})


def test_the_environment_of_this_process_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = dict(os.environ)
    with libraries_start_python():
        assert os.environ["PYTHONSAFEPATH"] == "1"
        assert "PYTHONPATH" not in os.environ
    assert dict(os.environ) == before


def test_numba_is_imported_only_behind_what_keeps_its_settings_out() -> None:
    importing = {
        name
        for name, text in modules().items()
        if re.search(r"^\s*(import|from) numba\b", text, re.MULTILINE)
    }
    guarded = ("kernels/cpu/", "runners/cpu/")  # what is imported first there: their __init__
    unguarded = {each for each in importing if not each.startswith(guarded)}
    assert {Path(each).parent for each in unguarded} <= {Path("midfill_lab/bench/roofline")}


def uses(tree: ast.Module) -> set[str]:
    """Return which of the ways to start a Python a module uses."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("sys"), attr="executable" | "_base_executable"):
                found.add("sys.executable")
            case ast.Import(names=names) if any(n.name == "multiprocessing" for n in names):
                found.add("multiprocessing")
            case ast.Name("libraries_start_python"):
                found.add("libraries_start_python")
            case ast.Call(args=[ast.List(elts=[ast.Constant(value=str(name)), *_]), *_]):
                if name.startswith("python"):
                    found.add("python")
    return found


def test_nothing_else_starts_a_python() -> None:
    found = {name: uses(ast.parse(text)) for name, text in modules().items()}
    assert {name for name, used in found.items() if "sys.executable" in used} == {
        "system/python_child.py"
    }, "start it with midfill.system.python_child"
    assert not [name for name, used in found.items() if "python" in used]
    unsafe = {"multiprocessing"}
    assert not [name for name, used in found.items() if used & unsafe == unsafe and len(used) == 1]
