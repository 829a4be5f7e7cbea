"""The built wheel, installed in an environment of its own and used from outside the source tree."""

import email
import importlib.util
import os
import site
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from running_server import start

from midfill.models.checkpoints.model_store import SHIPPED_ADAPTERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]


def run(command: Sequence[str | Path], cwd: Path) -> str:
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


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

TORCH = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is made of, so that builds leave nothing in the source tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        run(["cp", "-r", ROOT / name, source], source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from it."""
    return built_wheel(source, tmp_path_factory.mktemp("wheel"))


def built_wheel(source: Path, folder: Path) -> Path:
    run([*PIP, "wheel", "--no-deps", "--wheel-dir", folder, source], folder)
    (wheel,) = folder.glob("midfill-*.whl")
    return wheel


def environment_of(
    wheel: Path, folder: Path, requirements: Sequence[str], lent: Sequence[str]
) -> Path:
    """Make an environment with a wheel; return its interpreter.

    Args:
        requirements: further libraries that are installed there.
        lent: folders where others are found.
    """
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    pip = [*PIP, "--python", python, "install"]
    run([*pip, "--no-deps", wheel], folder)
    if requirements:
        run([*pip, *requirements], folder)
    (libraries,) = (folder / "venv").glob("lib/python*/site-packages")
    (libraries / "libraries.pth").write_text("\n".join(lent))
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has midfill from its wheel, and its libraries from this environment."""
    return environment_of(
        wheel, tmp_path_factory.mktemp("environment"), [], lent=site.getsitepackages()
    )


def test_it_installs_everywhere_and_says_what_it_is(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    for field in ("Summary", "Keywords", "Classifier", "License-File"):
        assert metadata[field], field


def test_a_source_distribution_builds_the_same_wheel(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    run([sys.executable, "-m", "venv", tmp_path / "build"], tmp_path)
    builder = tmp_path / "build" / "bin" / "python"
    run([*PIP, "--python", builder, "install", "setuptools>=77"], tmp_path)
    code = "from setuptools.build_meta import build_sdist; build_sdist(__import__('sys').argv[1])"
    run([builder, "-c", code, tmp_path], source)
    (archive,) = tmp_path.glob("midfill-*.tar.gz")
    again = built_wheel(archive, tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        contents = [{each.filename: each.CRC for each in zip.infolist()} for zip in (one, other)]
    assert contents[0] == contents[1]


def test_it_serves_with_the_libraries_that_it_requires(
    wheel: Path, tmp_path: Path, tiny_folder: Path
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [each for each in project["dependencies"] if not each.startswith("torch")]
    lent = tmp_path / "lent"  # torch is several gigabytes where pip takes its usual build
    lent.mkdir()
    for name in TORCH:
        (spec,) = importlib.util.find_spec(name).submodule_search_locations  # type: ignore[union-attr,misc]
        (lent / name).symlink_to(spec)
    python = environment_of(wheel, tmp_path, required, lent=[str(lent)])
    for arguments in (["--help"], ["serve", "--help"], ["models"]):
        assert run([python, "-m", "midfill", *arguments], tmp_path)
    with start(tiny_folder, "--kv-memory", "4MB", python=python) as server:
        assert server.complete(prompt="def f(", suffix="return x", max_tokens=4)["choices"]


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


def test_it_says_where_commands_that_measure_are_and_the_lab_brings_them(
    wheel: Path, tmp_path: Path
) -> None:
    (libraries,) = site.getsitepackages()[:1]
    lent = tmp_path / "lent"
    lent.mkdir()
    for path in Path(libraries).iterdir():
        if "midfill" not in path.name:
            (lent / path.name).symlink_to(path)
    python = environment_of(wheel, tmp_path, [], lent=[str(lent)])
    midfill = python.with_name("midfill")
    refused = subprocess.run(
        [midfill, "bench", "speed"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "install it with: pip install midfill-lab" in refused.stderr
    run(["cp", "-r", ROOT / "lab", tmp_path], tmp_path)
    run([*PIP, "--python", python, "install", "--no-deps", tmp_path / "lab"], tmp_path)
    for command in (["bench"], ["eval"], ["train"], ["methods", "calibrate"]):
        assert "Usage" in run([midfill, *command, "--help"], tmp_path)


def test_it_serves(python: Path, tiny_folder: Path) -> None:
    with start(tiny_folder, "--kv-memory", "4MB", python=python) as server:
        answer = server.complete(prompt="def f(", suffix="return x", max_tokens=4)
        assert answer["usage"]["completion_tokens"] > 0
        assert "midfill playground" in server.get("/").text


def test_it_passes_tests_that_are_run_from_another_folder(python: Path, tmp_path: Path) -> None:
    folders = [ROOT / "tests" / name for name in ("kv/tiers", "models/tokens", "system")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    assert "passed" in run([python, "-m", "pytest", *options, *folders], tmp_path)
