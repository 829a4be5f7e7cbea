"""What is compiled before there is a model is what models run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import midfill
from midfill.kernels.cpu.decoder import forward
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.opening import open_model
from midfill.runners.cpu.compile_ahead import compile_ahead
from midfill.runners.cpu.runner import CpuRunner


def test_a_model_needs_nothing_more(tiny_folder: Path) -> None:
    compile_ahead(KVCacheDtype.F32)
    compiled = list(forward.signatures)  # type: ignore[attr-defined]
    CpuRunner.load(open_model(tiny_folder, None, "auto"), slots=64, kv_cache_dtype="f32").close()
    assert list(forward.signatures) == compiled  # type: ignore[attr-defined]


SOURCE = Path(midfill.__file__).parents[1]
ALONE = """
import sys
from importlib.machinery import PathFinder

class Installed:
    def find_spec(self, name, path=None, target=None):
        spec = None if "." in name else PathFinder.find_spec(name, path)
        if spec and "site-packages" in (spec.origin or "") and name not in {allowed}:
            raise ModuleNotFoundError(name + " is not installed yet", name=name)

sys.meta_path.insert(0, Installed())
import midfill.runners.cpu.compile_ahead
"""


def test_the_makefile_installs_what_compiling_imports_first() -> None:
    makefile = SOURCE.parent / "Makefile"
    named = re.search(r"foreach name,([\w ]+),", makefile.read_text())
    assert named is not None
    program = ALONE.replace("{allowed}", repr([*named[1].split(), "llvmlite"]))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=True)
