"""What tests of several folders share: a cache of their own, a tiny model with a chat template.

Where torch, or a library that needs it, is not installed, tests that import it are skipped.
"""

import contextlib
import ctypes
import gc
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from amx_emulation import build_emulator, chip_has_amx, reason_to_skip
from hypothesis import HealthCheck, settings
from hypothesis.errors import HypothesisSideeffectWarning
from hypothesis.strategies import text
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import MidfillError
from midfill.system.cache import cache_folder
from midfill.system.process import freeze_objects

if TYPE_CHECKING:
    from midfill.models.checkpoints.checkpoint import Checkpoint

_NEW_OBJECTS = 20_000
"""Between two collections of the youngest: with Python's 700, they take a tenth of all time."""
_MUCH_MEMORY = 16 << 20

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
    # In an empty clone, the first text builds Hypothesis's table of characters, and 200 MB of
    # garbage; the controller builds it for the workers, while this process is small.
    with warnings.catch_warnings(action="ignore", category=HypothesisSideeffectWarning):
        text().validate()
    # Modules and tests are millions of objects that stay; see pytest_collection_finish.
    gc.disable()
    config.add_cleanup(gc.enable)


def pytest_collection_finish() -> None:
    """Have garbage collections look at what tests make, not at the tests and their modules."""
    freeze_objects()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def no_calibrations_of_other_modules() -> Iterator[None]:
    """Forget what a module's tests have calibrated: tiny models are the same everywhere."""
    yield
    shutil.rmtree(cache_folder() / "calibrations", ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Give back what a module's tests have left in memory, where that is much."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        _memory.give_back()
    return result


class _Memory:
    """This process's memory, and what it was when some was last given back."""

    def __init__(self) -> None:
        self._kept = 0

    def give_back(self) -> None:
        """Collect garbage and return free pages, if much memory was taken since the last time."""
        if self._resident() - self._kept < _MUCH_MEMORY:
            return
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)
        self._kept = self._resident()

    @staticmethod
    def _resident() -> int:
        """Return the bytes in memory; 0 where the system doesn't say."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")


_memory = _Memory()

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
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with random weights, as ``tiny_checkpoints`` writes it."""
    return write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def llama(llama_folder: Path) -> "Checkpoint":
    """The same, opened; a module may change what it says of itself."""
    from midfill.models.checkpoints.opening import open_checkpoint

    return open_checkpoint(llama_folder)


@pytest.fixture(scope="module")
def small_roofline() -> Iterator[None]:
    """A machine's bandwidth is measured with 32 MiB of memory in place of 512."""
    from midfill_lab.bench.roofline import ceilings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "LARGEST_BYTES", 32 << 20)
        yield


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
