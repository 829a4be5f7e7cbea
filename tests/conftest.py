"""What tests of several folders share: a cache of their own, a tiny model with a chat template.

Where torch, or a library that needs it, is not installed, tests that import it are skipped.
"""

import gc
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from amx_emulation import build_emulator, chip_has_amx, reason_to_skip
from hypothesis import HealthCheck, settings
from tiny_checkpoints import write_tiny

from midfill.errors import MidfillError
from midfill.system.cache import cache_folder
from midfill.system.process import freeze_objects

# A machine that is busy makes no test wrong.
settings.register_profile("midfill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("midfill")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|endoftext|>' + message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|endoftext|>assistant: ' }}{% endif %}"
)


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests a cache folder of their own, with the user's kernels and models in it."""
    users, tests = cache_folder(), Path(tempfile.mkdtemp(prefix="midfill-tests-"))
    for name in ("arm64", "kernels", "models"):
        (users / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        (tests / name).symlink_to(users / name)
    os.environ["MIDFILL_CACHE"] = str(tests)
    # Tiny models gain nothing from torch's threads, and lose much where cores are busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.add_cleanup(lambda: shutil.rmtree(tests, ignore_errors=True))
    # Modules and tests are millions of objects that stay; see pytest_collection_finish.
    gc.disable()
    config.add_cleanup(gc.enable)


def pytest_collection_finish() -> None:
    """Have garbage collections look at what tests make, not at the tests and their modules."""
    freeze_objects()
    gc.enable()


_MISSING = [name for name in ("torch", "accelerate", "peft") if find_spec(name) is None]
_NEEDS_TORCH = " needs torch; install it with"
_MISSING_MODULE = re.compile(rf"No module named '({'|'.join(_MISSING)})[.']")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip modules that import a library that is not installed."""
    report = yield
    if _MISSING and report.failed:
        missing = _MISSING_MODULE.search(str(report.longrepr))
        if missing is not None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[1]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Skip tests whose fixtures get to a library that is not installed."""
    yield from _skip_without_libraries()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skip tests that get to a library that is not installed."""
    yield from _skip_without_libraries()


def _skip_without_libraries() -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ModuleNotFoundError) and cause.name in _MISSING:
            pytest.skip(f"needs {cause.name}")
        if "torch" in _MISSING and isinstance(error, MidfillError) and _NEEDS_TORCH in str(error):
            pytest.skip("needs torch")
        raise


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 320 tokens and 512 tokens of context, with FIM tokens and a chat template."""
    return _write(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def amx_emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulator of AMX, compiled; skips where it can't be used."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    return build_emulator(tmp_path_factory.mktemp("amx"))


@pytest.fixture(scope="session")
def amx_chip(request: pytest.FixtureRequest) -> Path | None:
    """What runs tile instructions: the emulator, or None where the chip does."""
    if chip_has_amx():
        return None
    emulator: Path = request.getfixturevalue("amx_emulator")
    return emulator


def _write(folder: Path) -> Path:
    write_tiny("llama", folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(settings))
    return folder
