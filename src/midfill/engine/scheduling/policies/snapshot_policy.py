"""SnapshotPolicy: after which tokens of a prompt its state is kept, in models with states.

Source: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", 2024, arXiv 2411.19379,
section 4.1: states are too large to be kept every few tokens, so they are kept where prompts are
likely to part: at the end of an answer, and where a prompt is seen to part from cached text, since
others will do so there, too. Answers' ends cost nothing here, for the sequence needs its state no
more.

For infilling there are two more. Shortly before a prompt's end: the next prompt, some keystrokes
later, has all but the last word of this one. And shortly before the end of the text that stands
before the suffix: where prompts will part when more text moves there.

The paper's eviction weighs what a state saves against its size; here the least recently used goes
first (``kv.state_pool``).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotPolicy:
    """Chooses where a prompt's prefill stops for a snapshot.

    Attributes:
        spacing: tokens between two places near the ends of prompts, so that prompts that grow
            keystroke by keystroke share a snapshot.
        margin: at least so many tokens follow such a place: the last word may be cut into other
            tokens when it is longer.
        max_repeated: a place where prompts part, or will, gets a snapshot if the last one is more
            tokens before it.
    """

    spacing: int = 32
    margin: int = 16
    max_repeated: int = 64

    def __post_init__(self) -> None:
        if self.spacing < 1 or self.margin < 1 or self.max_repeated < 0:
            raise ValueError("spacing and margin must be at least 1, max_repeated at least 0")

    def positions(self, length: int, computed: int, known: int, head: int = 0) -> tuple[int, ...]:
        """Return after how many tokens states are to be kept, ascending.

        Args:
            length: tokens of the prompt, and of the answer so far where it was preempted.
            computed: how many of them need not be computed, up to the last snapshot.
            known: how many have KV in the cache; there the prompt parts from cached text.
            head: how many stand before the text after the caret; 0 if that isn't known.
        """
        near_end = (length - self.margin) // self.spacing * self.spacing
        chosen = {near_end}
        before = max(computed, near_end) if near_end <= known else computed
        if known - before > self.max_repeated:
            chosen.add(known)
        if head - self.margin - computed > self.max_repeated:
            chosen.add(head - self.margin)
        return tuple(sorted(place for place in chosen if computed < place < length))
