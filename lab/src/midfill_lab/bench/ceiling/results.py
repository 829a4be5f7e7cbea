"""What ``midfill bench ceiling`` is asked for, and what it finds."""

from collections.abc import Sequence
from statistics import median

import msgspec

from midfill.engine.messages import EngineInfo
from midfill.errors import OptionError
from midfill.system.machine import Machine
from midfill_lab.bench.engine_loads import Load
from midfill_lab.bench.roofline.bounds import StepBound
from midfill_lab.bench.roofline.ceilings import Roofline

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
_DECODED = 16
"""Steps of a round."""


class CeilingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        prefill: prompt lengths, in tokens.
        contexts: tokens before the first decoded one.
        streams: decoded at once.
        rounds: measurements of each load, each between two measurements of the machine.
    """

    prefill: tuple[int, ...] = (512, 2000)
    contexts: tuple[int, ...] = (16, 500, 2000)
    streams: tuple[int, ...] = (1, 4, 16)
    rounds: int = 6

    def loads(self) -> list[tuple[str, Load]]:
        """Return the loads, each with its phase; prefill first, decode and then both at once."""
        prompts = [
            (
                PREFILL,
                Load(name=f"prefill of {n:,}", context=0, rows=n, repeats=self.rounds),
            )
            for n in self.prefill
        ]
        decodes = [
            (
                DECODE,
                Load(
                    name=_named(streams, context),
                    streams=streams,
                    context=context,
                    repeats=_DECODED * self.rounds,
                ),
            )
            for context in self.contexts
            for streams in self.streams
        ]
        beside = self.prefill[0]
        mixed = [
            (
                MIXED,
                Load(
                    name=f"{_named(streams, self.contexts[0])}, a prompt of {beside:,} beside",
                    streams=streams,
                    context=self.contexts[0],
                    prompt=beside,
                    repeats=self.rounds,
                ),
            )
            for streams in self.streams
        ]
        return [*prompts, *decodes, *mixed]

    def repeats(self, load: Load) -> int:
        """Return the repeats of a load in one round."""
        return load.repeats // self.rounds

    def check(self, context: int) -> None:
        """Refuse what a model has no room for.

        Args:
            context: the most tokens of a prompt and its answer.

        Raises:
            OptionError: a prompt or a context is too long.
        """
        for option, lengths in (("--prefill", self.prefill), ("--contexts", self.contexts)):
            if (longest := max(lengths)) >= context:
                raise OptionError(
                    f"{option} {longest}: the model's context is {context} tokens, answer included;"
                    " name shorter ones"
                )


def _named(streams: int, context: int) -> str:
    return f"decode at {context:,}, {streams} stream{'' if streams == 1 else 's'}"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The median of several rounds, the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(median=median(values), lowest=min(values), highest=max(values))


class LoadCeiling(msgspec.Struct, frozen=True, kw_only=True):
    """A load's bound and what is reached.

    Attributes:
        phase: prefill, decode or mixed.
        load: what ran.
        tokens: that one repeat computes.
        bound: of one repeat, under the best ceilings of the load's rounds.
        seconds: of one repeat, by round; None where the KV pool has no room for the load.
        reached: the bound as a share of the time, by round, each under the ceilings measured just
            before and after it; None where nothing was measured.
        of_plain_read: the time to do nothing but read a step's bytes, just before and after, as a
            share of the step's, by round; None where nothing was measured, or memory doesn't bind.
    """

    phase: str
    load: Load
    tokens: float
    bound: StepBound
    seconds: Spread | None = None
    reached: Spread | None = None
    of_plain_read: Spread | None = None


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """The four bounds under a change, beside those without it.

    Attributes:
        name: the change.
        kv_bytes: held per token of the context, in all layers.
        users: whose contexts fit into the KV pool at once.
        decode_one, decode_many: least seconds of a step of one stream and of the most streams.
        prefill: least seconds of the longest prompt.
    """

    name: str
    kv_bytes: float
    users: int
    decode_one: float
    decode_many: float
    prefill: float


class Crossovers(msgspec.Struct, frozen=True, kw_only=True):
    """Where another resource begins to bind.

    Attributes:
        rows: of a step from which on the products of the layers take longer than reading their
            weights.
        context: tokens of one stream from which on a step reads more KV than weights.
        prompt: tokens of a prompt from which on attention takes longer than the products of the
            layers.

    The last two are None where that is so nowhere within the model's context.
    """

    rows: int
    context: int | None
    prompt: int | None


class CeilingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        options: what was measured.
        roofline: the best ceilings of the whole run.
        loads: bound and measured, by load.
        moved: what changes of KV, rows and pairs would do, the first one nothing; at the longest
            context and prompt.
        crossovers: under ``roofline``.
        load_average: of the machine when the run began.
        others: share of all processor time that others took meanwhile; None where the system
            doesn't say.
    """

    model: str
    machine: Machine
    engine: EngineInfo
    options: CeilingOptions
    roofline: Roofline
    loads: list[LoadCeiling]
    moved: list[Moved]
    crossovers: Crossovers
    load_average: float
    others: float | None
