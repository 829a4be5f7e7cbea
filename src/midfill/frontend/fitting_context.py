"""FittingContext: which of a client's other files go into a prompt, where not all of them fit.

The first ones are left out. If that were done to the last token, a client that sends one more file
each time would have its first one left out each time, and what follows it computed again. So a
choice stands while the files take up to 9/16 of the context; then the first are left out until they
take 7/16 at most. The share does not depend on the document, so that typing does not change what is
left out.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate

from midfill.infill.context_files import ContextFile

_MOST, _LEAST = 9 / 16, 7 / 16  # of the context
_MAX_TENANTS = 4096


class FittingContext:
    """Remembers where each tenant's last choice began.

    Args:
        context: the model's, in tokens.
        count: returns the tokens of a file as it is shown; of a very long one, any large number.
    """

    def __init__(self, context: int, count: Callable[[ContextFile], int]) -> None:
        self._most, self._least = int(_MOST * context), int(_LEAST * context)
        self._count = count
        self._firsts: OrderedDict[str, int] = OrderedDict()  # hash of the first file, by tenant

    def choose_and_record(
        self, files: Sequence[ContextFile], tenant: str
    ) -> tuple[ContextFile, ...]:
        """Return the last of the files, as many as fit."""
        sizes = []
        for total in accumulate(self._count(file) for file in reversed(files)):
            sizes.append(total)
            if total > self._most:
                break
        most = sum(size <= self._most for size in sizes)
        if most == len(files):
            return tuple(files)
        least = sum(size <= self._least for size in sizes)
        standing = self._firsts.get(tenant)
        kept = next(
            (count for count in range(most, least, -1) if hash(files[-count]) == standing), least
        )
        if kept:
            self._firsts[tenant] = hash(files[-kept])
            self._firsts.move_to_end(tenant)
        if len(self._firsts) > _MAX_TENANTS:
            self._firsts.popitem(last=False)
        return tuple(files[len(files) - kept :])
