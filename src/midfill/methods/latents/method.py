"""PartedLatents: the protocol of methods whose answers attend to each part of the latents alone.

The prompt is computed exactly, and its KV is the tenant's. Rows after it have a norm and a softmax
of each part, so their KV is approximate: it is the sequence's own, and never cached.
"""

from typing import Protocol, runtime_checkable


@runtime_checkable
class PartedLatents(Protocol):
    """A method with its hyper-parameters, ready for a model. It has no state."""

    @property
    def attends_by_parts(self) -> bool:
        """Whether rows after the prompt do so; it is what tells these methods from others."""
