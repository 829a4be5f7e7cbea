"""pip: also where the environment has none, as those of uv have."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import midfill
from midfill.system.pip import pip_version, run_pip

PROGRAM = """
from importlib.util import find_spec
from midfill.system.pip import pip_version, run_pip
assert find_spec("pip") is None
code, output, errors = run_pip(["--version"])
assert code == 0 and output.startswith("pip %d.%d" % pip_version()), errors
"""


@pytest.mark.skipif(find_spec("ensurepip") is None, reason="this Python's library has no pip")
def test_an_environment_without_pip_uses_that_of_python_s_library(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    environment = os.environ | {"PYTHONPATH": str(Path(midfill.__file__).parents[1])}
    command = [tmp_path / "venv" / "bin" / "python", "-c", PROGRAM]
    subprocess.run(command, env=environment, check=True)


def test_pip_s_version_is_that_of_the_pip_that_runs() -> None:
    _, output, _ = run_pip(["--version"])
    assert output.startswith("pip {}.{}".format(*pip_version()))
