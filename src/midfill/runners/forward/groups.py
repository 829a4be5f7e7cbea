"""KeyGroup: keys that rows attend to with a temperature and a scale of their own."""

from typing import NamedTuple


class KeyGroup(NamedTuple):
    """The first keys of a request, apart from the others.

    With the scores s of a group's keys, o = softmax(s / temperature) V and the mass
    m = log sum exp(s / temperature), against o' and m' of the other keys at temperature 1, a row's
    attention is w o + (1 - w) o', where w = sigmoid(scale * temperature * m - m').

    Attributes:
        keys: how many of the request's ``kv_slots`` are in the group; its rows see all of them.
        temperature: above 0.
        scale: above 0.
    """

    keys: int
    temperature: float
    scale: float

    @property
    def power(self) -> float:
        """The power that the group's sum of exponentials is raised to."""
        return self.scale * self.temperature
