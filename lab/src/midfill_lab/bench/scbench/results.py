"""Results of a run: a row per answer, in a file that an interrupted run continues."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from midfill.errors import MidfillError
from midfill.system.machine import Machine
from midfill_lab.bench.methods.results import FULL, Variant

Mode = Literal["turns", "requests"]
"""Questions follow each other in one conversation, or each is a request with the context before
it."""

MODES: tuple[Mode, ...] = ("turns", "requests")

Reuse = Literal["held", "anew"]
"""What a later question finds: what the method has kept after the first one (turns) or after the
context (requests), as SCBench has it; or the exact KV in the cache, which the method compresses
anew with the question in view, as midfill serves."""

REUSES: tuple[Reuse, ...] = ("held", "anew")


class Key(NamedTuple):
    """What one row is of.

    Attributes:
        model: digest of the model.
        sample: digest of the sample.
        mode, reuse: see above; full KV is the same under both and is stored under "anew".
        turn: number of the question.
        method: specification.
    """

    model: str
    sample: str
    mode: Mode
    reuse: Reuse
    turn: int
    method: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        model, sample, mode, reuse, turn, method: see ``Key``.
        task: its name.
        length: tokens that were asked for.
        number: of the sample.
        prompt_tokens: of the prompt.
        cached_tokens, reused_tokens, held_slots: see ``session.Generated``.
        answer: what was generated.
        score: of it, from 0 to 1.
        guess: what the right answers to the context's other questions of this kind would score, on
            average: a model that knows what answers look like, and not which is right.
        same: whether it is full KV's answer.
        logprob: mean log-probability of the right answer's tokens, in nats; None where a method
            leaves none.
        divergence: mean Kullback-Leibler divergence of their distributions from full KV's.
    """

    model: str
    sample: str
    mode: Mode
    reuse: Reuse
    turn: int
    method: str
    task: str
    length: int
    number: int
    prompt_tokens: int
    cached_tokens: int
    reused_tokens: int
    held_slots: int | None
    answer: str
    score: float
    guess: float
    same: bool
    logprob: float | None
    divergence: float | None

    @property
    def key(self) -> Key:
        """What it is of."""
        return Key(self.model, self.sample, self.mode, self.reuse, self.turn, self.method)


class SCBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        tasks: names.
        lengths: tokens of a context with its questions and answers.
        contexts: per task and length.
        turns: questions per context.
        seed: of all random choices.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (2000,)
    contexts: int = 10
    turns: int = 5
    seed: int = 0


class SCBenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call asked for, measured now or before.

    Attributes:
        machine: which showed it; rows that were measured before may be another's.
        model: its name.
        backend: what ran it.
        text: where the contexts' text comes from.
        variants: without full KV, which is always measured.
        refused: by specification, why the model can't be used with a method.
        rows: in the order of the run.
    """

    machine: Machine
    options: SCBenchOptions
    model: str
    backend: str
    text: str
    variants: list[Variant]
    refused: dict[str, str]
    rows: list[Row]

    @property
    def methods(self) -> list[str]:
        """Specifications that have rows, full KV first."""
        found = {row.method for row in self.rows}
        names = [FULL, *(variant.specification for variant in self.variants)]
        return [name for name in names if name in found]


class ResultFile:
    """Rows in a file of JSON lines.

    Each is written as soon as it is known. A line that an interruption has cut off is dropped.
    """

    def __init__(self, path: Path | None) -> None:
        """Read what there is.

        Args:
            path: the file; None keeps rows in memory alone.

        Raises:
            MidfillError: it can't be read, or holds something else.
        """
        self._path = path
        self._rows: dict[Key, Row] = {}
        if path is not None and path.exists():
            for row in _read(path):
                self._rows[row.key] = row

    def find(self, key: Key) -> Row | None:
        """Return a row that is known; None if it isn't."""
        return self._rows.get(key)

    def add(self, rows: Sequence[Row]) -> None:
        """Write rows.

        Raises:
            MidfillError: the file can't be written.
        """
        self._rows.update((row.key, row) for row in rows)
        if self._path is None:
            return
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        except OSError as error:
            raise MidfillError(f"{self._path} can't be written: {error.strerror}") from error


def _read(path: Path) -> list[Row]:
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MidfillError(
                f"{path}, line {number}: no result of bench scbench ({error}); name another file"
            ) from error
    return rows
