"""TemplateProcess: chat templates rendered in a process of their own, which may be ended."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from midfill.errors import InvalidRequestError

_WORKER = "midfill.frontend.template_worker"
_MAX_SECONDS = 30.0  # of real time, if the kernel doesn't count time of computing
_MAX_FAILURES = 3
_OWN_VARIABLES = "MIDFILL_"  # keys among them


class TemplateProcess:
    """Renders conversations, one at a time. Thread-safe.

    The process is started when it is first needed, again when it was ended, and ends with this
    one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, source: str, variables: Mapping[str, str], messages: Sequence[Mapping[str, str]]
    ) -> Mapping[str, str] | None:
        """Return the ``text``, or why it was ``refused`` or the template is ``broken``.

        None if it took too long or too much memory, and the process was ended.
        """
        line = json.dumps([source, variables, messages]).encode() + b"\n"
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(_MAX_SECONDS, process.kill)
            timer.start()
            answer = b""
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
                    answer = process.stdout.readline()
            finally:
                timer.cancel()
                if not answer.endswith(b"\n"):
                    self._end()
        return json.loads(answer) if answer.endswith(b"\n") else None

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's to handle
                env={k: v for k, v in os.environ.items() if not k.startswith(_OWN_VARIABLES)},
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # what was not written yet
            process.communicate()


_process = TemplateProcess()
atexit.register(_process.close)


class ProcessTemplate:
    """A template that the one process of this program renders.

    Args:
        source: of the template.
        variables: more names that it may use.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._failures = 0  # one after the other

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt as text.

        Raises:
            InvalidRequestError: the template is broken, refuses these messages, or takes too long
                or too much memory. One that does so several times in turn is not tried any more.
        """
        if self._failures >= _MAX_FAILURES:
            raise refused("is broken", "it takes too long or too much memory")
        answer = _process.render(self._source, self._variables, messages)
        if answer is None:
            self._failures += 1
            raise refused("fails for these messages", "it takes too long or too much memory")
        self._failures = 0
        if "broken" in answer:
            raise refused("is broken", answer["broken"])
        if "refused" in answer:
            raise refused("refuses these messages", answer["refused"])
        return answer["text"]


def refused(what: str, why: str) -> InvalidRequestError:
    """Return the error for a conversation that can't be rendered."""
    hint = "; use /v1/completions" if what == "is broken" else ""
    return InvalidRequestError(f"the model's chat template {what}: {why}{hint}", param="messages")
