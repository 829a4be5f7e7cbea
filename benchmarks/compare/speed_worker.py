"""SpeedWorker: a version of midfill in a process of its own that stays loaded between requests."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from benchmarks.compare import worker_program
from benchmarks.compare.copies import VersionCopy, last_lines
from midfill.errors import MidfillError

_END_SECONDS = 10.0
T = TypeVar("T")


class _Loaded(msgspec.Struct, frozen=True):
    """The answer to a model: its name."""

    loaded: str


class Timing(msgspec.Struct, frozen=True):
    """How long one request took.

    Attributes:
        first_seconds: up to the first piece of the answer.
        later_seconds: from there to the last one.
        later_tokens: tokens that came in that time.
    """

    first_seconds: float
    later_seconds: float
    later_tokens: int


class _StreamsTiming(msgspec.Struct, frozen=True):
    """How long answers to several prompts at once took."""

    seconds: float


class SpeedWorker:
    """Runs ``worker_program.py`` with a version. A context manager that always ends the process.

    The process is in a session of its own, so that Ctrl-C on the terminal reaches only the caller,
    who leaves the context. Should the caller be killed, the process finds its input at an end.

    Args:
        copy: the version.
        folder: for the program itself and for what it prints.
    """

    def __init__(self, copy: VersionCopy, folder: Path) -> None:
        self._copy = copy
        self._log = folder / f"{copy.side}.log"
        self._program = folder / "worker_program.py"
        if not self._program.exists():  # copied, since the tree can be edited meanwhile
            shutil.copyfile(Path(worker_program.__file__), self._program)

    def __enter__(self) -> "SpeedWorker":
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._copy.command(str(self._program)),
                env=self._copy.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                # It may end at this very moment.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # what was written and never read
                stream.close()

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    def load(self, model: str, threads: int | None) -> None:
        """Load a model; must be called once, before ``measure``.

        Raises:
            MidfillError: the process ended, or gave another answer.
        """
        self._ask({"model": model, "threads": threads}, _Loaded)

    def measure(self, prompt: Sequence[int], tokens: int) -> Timing:
        """Time a greedy answer of so many tokens to a prompt of token ids.

        Raises:
            MidfillError: the process ended, or gave another answer.
        """
        return self._ask({"prompt": prompt, "tokens": tokens}, Timing)

    def measure_streams(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Return the seconds of greedy answers of so many tokens to all prompts at once.

        The prompts are in the cache when the time begins.

        Raises:
            MidfillError: the process ended, or gave another answer.
        """
        return self._ask({"prompts": prompts, "tokens": tokens}, _StreamsTiming).seconds

    def _ask(self, request: dict[str, Any], kind: type[T]) -> T:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and so has what it writes
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._fail(self._ending())
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._fail(f"answered {line.decode(errors='replace').strip()!r}")

    def _ending(self) -> str:
        """Say how the process ended."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def _fail(self, what: str) -> NoReturn:
        said = last_lines(self._log.read_text("utf-8", errors="replace"))
        raise MidfillError(f"{self._copy.name} {what}: {said}")
