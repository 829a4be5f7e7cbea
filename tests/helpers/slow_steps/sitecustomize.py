"""Make every step of an engine process take at least ``MIDFILL_TEST_STEP_SECONDS``.

Python imports this module at its start where this folder is in PYTHONPATH (``slowed``). Only
processes that run an engine are changed. A tiny model's answer is otherwise over before a test
can do anything amid it.
"""

import os
import sys
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _run_shadowed() -> None:
    """Run the ``sitecustomize`` that the interpreter would have found without this one."""
    here = Path(__file__).parent
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _slow_down(seconds: float) -> None:
    """Let each step of this process's engine sleep before it does anything."""
    from midfill.engine.engine import Engine

    step = Engine.step

    def slow_step(engine: Engine) -> object:
        time.sleep(seconds)
        return step(engine)

    Engine.step = slow_step  # type: ignore[method-assign, assignment]


_run_shadowed()
if "midfill.engine.process.main" in sys.orig_argv:
    _slow_down(float(os.environ["MIDFILL_TEST_STEP_SECONDS"]))
