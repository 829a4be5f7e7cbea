"""HealedStart: whether an answer begins with the half word that was taken off its prompt.

A server that only continues text can't be told what its answer has to begin with. The prompt ends
before the half word, and in most cases the model writes it again. Where it doesn't, the answer is
useless, and has to be asked for with the half word in the prompt.
"""


class HealedStart:
    """The start of one answer.

    Args:
        required: what it has to begin with.

    Attributes:
        matches: whether it does; None while that is open.
        inside: whether the text that was added last is a part of it, and nothing more.
    """

    def __init__(self, required: str) -> None:
        self._required = required
        self._held = ""
        self.matches: bool | None = None if required else True
        self.inside = False

    def push(self, text: str) -> str:
        """Add text; return what is decided: everything so far, nothing, or the new text."""
        if self.matches is not None:
            self.inside = False
            return text if self.matches else ""
        self._held += text
        self.inside = self._required.startswith(self._held)
        if self._held.startswith(self._required):
            self.matches = True
            return self._held
        if not self._required.startswith(self._held):
            self.matches = False
        return ""

    def finish(self) -> None:
        """Record that the answer has ended."""
        if self.matches is None:
            self.matches = False
