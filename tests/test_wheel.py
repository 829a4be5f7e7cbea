"""The built wheel, installed in an environment of its own and used from outside the source tree."""

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import start

from midfill.models.checkpoints.model_store import SHIPPED_ADAPTERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]


def run(command: list[str | Path], cwd: Path) -> str:
    """Run a command in a folder; return what it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    """The environment variables without those that lead Python to the source tree."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has midfill from its wheel, and its libraries from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy of what the wheel is made of, so that the build leaves nothing in the source tree.
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        run(["cp", "-r", ROOT / name, source], folder)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], folder)
    (wheel,) = folder.glob("midfill-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    run([*pip, "--python", python, "install", "--no-deps", wheel], folder)
    (libraries,) = (folder / "venv").glob("lib/python*/site-packages")
    (libraries / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    return python


def test_it_holds_all_data_of_the_package(python: Path, tmp_path: Path) -> None:
    code = "import midfill, pathlib; print(pathlib.Path(midfill.__file__).parent)"
    package = Path(run([python, "-c", code], tmp_path).strip())
    assert package.is_relative_to(python.parents[1])
    source = ROOT / "src" / "midfill"
    for folder in (SHIPPED_ADAPTERS, source / "serving" / "server" / "pages" / "built"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files
        for file in files:
            installed = package / file.relative_to(source)
            assert installed.read_bytes() == file.read_bytes()


def test_its_command_lists_models_outside_the_tree(python: Path, tmp_path: Path) -> None:
    midfill = python.with_name("midfill")
    assert "serve" in run([midfill, "--help"], tmp_path)
    assert "smollm2-135m" in run([midfill, "models"], tmp_path)


def test_it_serves(python: Path, tiny_folder: Path) -> None:
    with start(tiny_folder, "--kv-memory", "4MB", python=python) as server:
        answer = server.complete(prompt="def f(", suffix="return x", max_tokens=4)
        assert answer["usage"]["completion_tokens"] > 0
        assert "midfill playground" in server.get("/").text


def test_it_passes_tests_that_are_run_from_another_folder(python: Path, tmp_path: Path) -> None:
    folders = [ROOT / "tests" / name for name in ("infill", "kv", "models/tokens", "system")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    assert "passed" in run([python, "-m", "pytest", *options, *folders], tmp_path)
