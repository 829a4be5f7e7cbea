"""The distribution midfill-gateway asks for midfill's libraries without the engine's."""

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[3]


def project(path: str) -> dict[str, list[str]]:
    """Return the dependencies of a distribution."""
    found: dict[str, list[str]] = tomllib.loads((ROOT / path).read_text("utf-8"))["project"]
    return found


def test_its_libraries_are_midfills() -> None:
    own = project("distributions/gateway/pyproject.toml")
    whole = project("pyproject.toml")
    gateway = whole["optional-dependencies"]["gateway"]
    assert set(own["dependencies"]) < {*whole["dependencies"], *gateway}
    assert set(gateway) < set(own["dependencies"])
    assert not any(line.startswith(("torch", "numba")) for line in own["dependencies"])


def test_the_command_imports_no_engine() -> None:
    program = (
        "import sys, midfill.cli.gateway_app, midfill.serving.gateway.gateway;"
        "engine = {'torch', 'numba', 'llvmlite', 'gguf', 'zmq', 'safetensors'};"
        "sys.exit(bool(engine.intersection(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_its_packages_are_all_that_is_imported() -> None:
    settings = tomllib.loads((ROOT / "distributions/gateway/pyproject.toml").read_text("utf-8"))
    packages = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    program = (
        "import sys, midfill.cli.gateway_app, midfill.serving.gateway.gateway;"
        "print(*(name for name in sys.modules if name.startswith('midfill.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    imported = {
        name if (ROOT / "src" / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]
        for name in done.stdout.split()
    }
    assert "midfill.serving.gateway" in imported
    assert not {name for name in imported if not any(fnmatch(name, each) for each in packages)}
