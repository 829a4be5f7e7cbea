"""Note which files of midfill's run in a server and its engine, between SIGUSR1 and SIGUSR2.

Python imports this module at its start where this folder is in PYTHONPATH. At SIGUSR2 the files are
written to ``MIDFILL_TEST_TRACES``, to a file named ``server`` or ``engine``.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

_ENGINE, _SERVE = "midfill.engine.process.main", "serve"


class _Trace:
    """The files whose functions were called."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: set[str] = set()
        self._running = False
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _begin(self, *_: object) -> None:
        self._running = True

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._running and event == "call":
            self._files.add(frame.f_code.co_filename)

    def _end(self, *_: object) -> None:
        self._running = False
        partial = self._path.with_suffix(".partial")
        partial.write_text("\n".join(sorted(self._files)))
        partial.rename(self._path)


for name, argument in (("engine", _ENGINE), ("server", _SERVE)):
    if argument in sys.orig_argv:
        _Trace(Path(os.environ["MIDFILL_TEST_TRACES"]) / name)
