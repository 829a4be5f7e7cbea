"""ParallelMethod: the protocol of methods under which other files don't see each other.

The files that a prompt shows before the document are computed apart, each after the tokens that
they all come after, and at the same positions. So the KV of a file is the same whichever files
stand beside it, in whatever order, and needs neither repair nor turning. What follows sees all of
them; a temperature and a scale make up for what their attention to each other would have done.
"""

from typing import Protocol, runtime_checkable


@runtime_checkable
class ParallelMethod(Protocol):
    """A method with its hyper-parameters; it has no state. Equal methods give equal KV.

    Attributes are those of ``runners.forward.attention.KeyPart``.
    """

    def __hash__(self) -> int: ...

    @property
    def temperature(self) -> float:
        """Divides the scores of the files' tokens."""

    @property
    def scale(self) -> float:
        """Of the files' mass."""
