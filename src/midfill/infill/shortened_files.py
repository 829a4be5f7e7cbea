"""Files that a client has shortened: their ends move with every keystroke, and needn't.

Continue fills its prompt with the beginnings of other files, as many tokens of them as the text
around the caret leaves. So each keystroke moves the end of such a file by a token, and since files
come before the document, everything after it would have to be computed again. A file that has lost
or won little at its end is therefore shown as it was shown last. It differs from what the client
has sent by text that it has sent before, or leaves out again.

That a file was shortened, rather than written, shows where it ends: inside a line. A file whose
text has changed anywhere else, or by more than a quarter, is shown as it comes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from midfill.infill.context import ContextFile

_MAX_CHANGE = 0.25  # of a file's characters
_MAX_FILES = 8
_MAX_CHARACTERS = 10_000  # of a file; clients do not send longer beginnings


@dataclass(frozen=True, slots=True)
class _Shown:
    """A file as it was shown last.

    Attributes:
        text: its text.
        shortened: whether it has been seen to end inside a line.
    """

    text: str
    shortened: bool = False


class ShortenedFiles:
    """Remembers the files of one tenant's last requests."""

    def __init__(self) -> None:
        self._shown: OrderedDict[str, _Shown] = OrderedDict()  # by path, the newest last

    def keep_and_record(self, files: Sequence[ContextFile]) -> tuple[ContextFile, ...]:
        """Return the files, those that were shortened a little differently as they were shown."""
        return tuple(self._kept(file) for file in files)

    def _kept(self, file: ContextFile) -> ContextFile:
        if not file.path or len(file.text) > _MAX_CHARACTERS:
            return file
        last = self._shown.get(file.path)
        shortened = last is not None and _is_shortened(last, file.text)
        keeps = last is not None and shortened and _changes_little(last.text, file.text)
        text = last.text if last is not None and keeps else file.text
        self._shown[file.path] = _Shown(text, shortened)
        self._shown.move_to_end(file.path)
        if len(self._shown) > _MAX_FILES:
            self._shown.popitem(last=False)
        return ContextFile(text, file.path)


def _is_shortened(last: _Shown, text: str) -> bool:
    """Return whether two states of a file are beginnings of one text, cut off by a client."""
    shorter, longer = sorted((last.text.rstrip("\n"), text.rstrip("\n")), key=len)
    if not longer.startswith(shorter):
        return False
    return last.shortened or longer[len(shorter) : len(shorter) + 1] not in ("", "\n")


def _changes_little(old: str, new: str) -> bool:
    return abs(len(old) - len(new)) <= _MAX_CHANGE * len(old)
