"""Experts on two devices, simulated: what assignment, slots and copies ahead save.

The policies are those that run (``midfill.runners.torch.experts``); devices and bus are a clock of
given costs, and the routers' outputs are drawn. Such figures tell what the policies do, not how
fast a machine is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.arrays import Float32Array
from midfill.runners.torch.experts.assignment import (
    LOOKAHEAD,
    Assignment,
    ExpertCosts,
    assign,
    ranked_copies,
)
from midfill.runners.torch.experts.slots import ExpertScores, LayerSlots
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

PUBLISHED = ExpertCosts(slow_start=0.79, slow_expert=0.0, slow_row=1.0, fast=0.5, copy=0.418)
"""In milliseconds, of the authors' code for DeepSeek's experts."""

ASSUMED = ExpertCosts(slow_start=0.02, slow_expert=0.23, slow_row=0.02, fast=0.05, copy=0.38)
"""In milliseconds, of an expert of 9.4 MB (Qwen3-30B-A3B's in bfloat16), if the CPU reads 40 GB/s
and the bus 25, and the GPU takes little more than the call."""

_AHEAD = 3
"""Layers whose experts are predicted; the paper's."""

_FAR = 1e9
Loads = dict[int, int]


@dataclass(frozen=True)
class LayerStep:
    """What the router of a layer makes of one step's rows.

    Attributes:
        rows: how many each chosen expert is sent.
        shares: float32 [experts], probabilities, on average over rows.
        ahead: the same as ``rows`` for the next layers, as they are predicted here.
    """

    rows: Loads
    shares: Float32Array
    ahead: Sequence[Loads]


@dataclass(frozen=True)
class MadeRouters:
    """Routers whose outputs change slowly from token to token, and little from layer to layer.

    Attributes:
        layers, experts, per_token: of the model.
        kept: correlation of an expert's output with that of the token before.
        predicted: correlation of a prediction with the output itself, per layer between them.
        sharpness: standard deviation of the outputs.
    """

    layers: int = 8
    experts: int = 64
    per_token: int = 6
    kept: float = 0.8
    predicted: float = 0.9
    sharpness: float = 2.0

    def steps(self, count: int, rows: int, seed: int) -> Iterator[list[LayerStep]]:
        """Yield steps of so many rows each, layer by layer."""
        rng = np.random.default_rng(seed)
        outputs = rng.normal(size=(self.layers, self.experts))
        for _ in range(count):
            each = []
            for _ in range(rows):
                outputs = self._moved(outputs, self.kept, rng)
                each.append(outputs)
            yield self._step(np.stack(each), rng)

    def _step(self, outputs: np.ndarray, rng: np.random.Generator) -> list[LayerStep]:
        shares = np.exp(self.sharpness * outputs)
        shares /= shares.sum(axis=-1, keepdims=True)
        mean = shares.mean(axis=0).astype(np.float32)
        step = []
        for layer in range(self.layers):
            ahead = [
                self._loads(self._moved(outputs[:, later], self.predicted ** (later - layer), rng))
                for later in range(layer + 1, min(layer + 1 + _AHEAD, self.layers))
            ]
            step.append(LayerStep(self._loads(outputs[:, layer]), mean[layer], ahead))
        return step

    def _moved(self, outputs: np.ndarray, kept: float, rng: np.random.Generator) -> np.ndarray:
        moved: np.ndarray = kept * outputs + np.sqrt(1 - kept**2) * rng.normal(size=outputs.shape)
        return moved

    def _loads(self, outputs: np.ndarray) -> Loads:
        chosen = np.argsort(-outputs, axis=-1)[:, : self.per_token]
        experts, counts = np.unique(chosen, return_counts=True)
        return dict(zip(experts.tolist(), counts.tolist(), strict=True))


class Eviction(ExpertScores):
    """Scores by another rule than HybriMoE's: what a layer's slots would be without it.

    Args:
        experts: how many there are.
        rule: "lru" has the experts that weren't chosen for longest go first, "random" any.
    """

    def __init__(self, experts: int, rule: str) -> None:
        super().__init__(experts, experts)
        self._rule, self._steps = rule, 0
        self._rng = np.random.default_rng(0)

    def chosen(self, experts: Sequence[int]) -> None:
        """Take note of what a step has chosen."""
        self._steps += 1
        if self._rule == "lru":
            self.assign(experts, self._steps)

    def update(self, shares: Float32Array) -> None:
        """Forget what the router thinks."""
        if self._rule == "random":
            drawn = self._rng.random(len(shares)).astype(np.float32)
            self.assign(range(len(shares)), drawn)


@dataclass(frozen=True)
class Policy:
    """One way of running experts.

    Attributes:
        name: in the table.
        believed: what it takes experts to cost; they cost what they do.
        lookahead: how many layers it copies ahead for.
        rule: by which slots are given away: "scores", "chosen" (HybriMoE's scores of chosen experts
            alone), "lru" or "random".
        by_rows: whether it copies ahead what is predicted most rows, and not what gains most.
    """

    name: str
    believed: ExpertCosts
    lookahead: int = 0
    rule: str = "scores"
    by_rows: bool = False

    def slots(self, held: Sequence[int], routers: MadeRouters) -> LayerSlots:
        """Return a layer's slots."""
        if self.rule in ("lru", "random"):
            return LayerSlots(held, Eviction(routers.experts, self.rule))
        considered = routers.per_token * (2 if self.rule == "scores" else 1)
        return LayerSlots(held, ExpertScores(routers.experts, considered))


def policies(costs: ExpertCosts) -> list[Policy]:
    """Return HybriMoE, parts of it, and what it is compared with."""
    never_slow = replace(costs, slow_start=_FAR, slow_row=_FAR)
    return [
        Policy("all of it", costs, lookahead=LOOKAHEAD),
        Policy("copied ahead for three layers", costs, lookahead=_AHEAD),
        Policy("copied ahead by rows", costs, lookahead=LOOKAHEAD, by_rows=True),
        Policy("nothing ahead", costs),
        Policy("nothing ahead, scores of chosen experts", costs, rule="chosen"),
        Policy("nothing ahead, least recently used", costs, rule="lru"),
        Policy("nothing ahead, at random", costs, rule="random"),
        Policy("always copied", never_slow, rule="lru"),
        Policy("a fixed part held", replace(costs, copy=_FAR)),
        Policy("always on the CPU", replace(costs, fast=_FAR)),
    ]


@dataclass
class Outcome:
    """What a policy has done.

    Attributes:
        seconds: of all layers, in the unit of the costs.
        chosen: experts that were needed, in layers and steps.
        held: those that were on the device by then.
        copied: copied for the layer that needs them, or ahead.
    """

    seconds: float = 0.0
    chosen: int = 0
    held: int = 0
    copied: int = 0


def replay(
    steps: Sequence[Sequence[LayerStep]],
    routers: MadeRouters,
    policy: Policy,
    slots: int,
    costs: ExpertCosts,
) -> Outcome:
    """Run steps by a policy.

    Args:
        steps: what routers have chosen.
        routers: made them.
        policy: decides.
        slots: experts of each layer that the device has room for.
        costs: of an expert.
    """
    rng = np.random.default_rng(0)
    held = [rng.permutation(routers.experts)[:slots].tolist() for _ in range(routers.layers)]
    layers = [policy.slots(each, routers) for each in held]
    outcome = Outcome()
    for step in steps:
        for number, (layer, own) in enumerate(zip(step, layers, strict=True)):
            own.scores.update(layer.shares)
            if isinstance(own.scores, Eviction):
                own.scores.chosen([*layer.rows])
            plan = timed(assign(layer.rows, own.held, slots, policy.believed), layer.rows, costs)
            outcome.seconds += plan.seconds
            outcome.chosen += len(layer.rows)
            outcome.held += sum(expert in own.held for expert in layer.rows)
            outcome.copied += len(plan.copied)
            for _ in own.operations(plan.fast, plan.copied):
                pass
            outcome.copied += _copy_ahead(policy, plan, layer, layers[number + 1 :], costs)
    return outcome


def timed(plan: Assignment, rows: Mapping[int, int], costs: ExpertCosts) -> Assignment:
    """Return an assignment with the times that it takes, whatever they were taken to be."""
    fast = bus = 0.0
    for expert in plan.fast:
        if expert in plan.copied:
            bus += costs.copy
            fast = max(fast, bus)
        fast += costs.fast
    slow = sum(costs.slow(rows[expert]) for expert in plan.slow)
    slow += costs.slow_start if plan.slow else 0.0
    return replace(plan, fast_seconds=fast, slow_seconds=slow, bus_seconds=bus)


def _copy_ahead(
    policy: Policy,
    plan: Assignment,
    layer: LayerStep,
    later: Sequence[LayerSlots],
    costs: ExpertCosts,
) -> int:
    """Copy experts of later layers while the bus is idle; return how many."""
    room = plan.idle_copies(costs)
    ahead = {
        number: (rows, slots)
        for number, (rows, slots) in enumerate(zip(layer.ahead, later, strict=False))
        if number < policy.lookahead
    }
    if policy.by_rows:
        wanted = [
            (number, expert)
            for number, (rows, slots) in ahead.items()
            for expert in sorted(rows, key=lambda each: -rows[each])
            if expert not in slots.held
        ]
    else:
        wanted = ranked_copies(ahead, costs)
    copied = 0
    for number, expert in wanted:
        rows, slots = ahead[number]
        if copied < room and slots.take(expert, rows) is not None:
            copied += 1
    return copied


class OffloadRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one size.

    Attributes:
        policy: its name.
        share: of the experts that there are slots for.
        rows: of each step.
        milliseconds: of a layer and step, on average, simulated.
        held: share of the experts needed that were on the device.
        copied: experts copied per layer and step.
    """

    policy: str
    share: float
    rows: int
    milliseconds: float
    held: float
    copied: float


class OffloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    source: str
    routers: MadeRouters
    costs: ExpertCosts
    steps: int
    results: list[OffloadRow]


def simulate(
    routers: MadeRouters,
    source: str,
    costs: ExpertCosts,
    sizes: Sequence[tuple[float, int]],
    steps: int,
) -> OffloadReport:
    """Run every policy over the same steps.

    Args:
        routers: make the steps.
        source: whose costs they are.
        costs: of an expert, in milliseconds.
        sizes: shares of the experts that there are slots for, and rows per step.
        steps: how many.
    """
    results = []
    for share, rows in sizes:
        # Prompts are short sequences of long steps.
        count = max(steps // rows, 8)
        made = list(routers.steps(count, rows, seed=0))
        for policy in policies(costs):
            slots = round(share * routers.experts)
            outcome = replay(made, routers, policy, slots, costs)
            layers = count * routers.layers
            results.append(
                OffloadRow(
                    policy=policy.name,
                    share=share,
                    rows=rows,
                    milliseconds=outcome.seconds / layers,
                    held=outcome.held / outcome.chosen,
                    copied=outcome.copied / layers,
                )
            )
    return OffloadReport(source=source, routers=routers, costs=costs, steps=steps, results=results)


def offload_table(report: OffloadReport) -> ResultTable:
    """Return the table: a row per policy, columns per size."""
    names = list(dict.fromkeys(result.policy for result in report.results))
    rows = []
    for name in names:
        cells = {"experts": name}
        for result in report.results:
            if result.policy == name:
                what = f"{result.share:.0%} held, {result.rows} row{'s' * (result.rows > 1)}"
                cells[what] = (
                    f"{result.milliseconds:.2f} ms, {result.held:.0%}, {result.copied:.1f}"
                )
        rows.append(cells)
    made, costs = report.routers, report.costs
    return ResultTable(
        title=f"Experts on two devices, simulated: {report.source}",
        rows=rows,
        caption="Simulated milliseconds per layer, share of the experts needed that the device held"
        f" by then, and experts copied per layer. {made.layers} layers of {made.experts} experts,"
        f" {made.per_token} per token; routers' outputs are drawn, with a correlation of"
        f" {made.kept:g} from token to token, and predictions of {made.predicted:g} per layer."
        f" Costs in milliseconds: {costs.slow_start:g} per layer, {costs.slow_expert:g} per expert"
        f" and {costs.slow_row:g} per row on the CPU, {costs.fast:g} on the device, {costs.copy:g}"
        " to copy.",
    )


def expert_offload(
    steps: Annotated[int, typer.Option(min=8, help="Tokens that are decoded.")] = 400,
    prompt: Annotated[int, typer.Option(min=2, help="Rows of a prompt's step.")] = 256,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Simulate experts on two devices: HybriMoE's policies beside its parts and simpler ones."""
    sizes = ((0.25, 1), (0.5, 1), (0.75, 1), (0.25, prompt))
    reports = [
        simulate(MadeRouters(), source, costs, sizes, steps)
        for source, costs in (("a large GPU", ASSUMED), ("HybriMoE's costs", PUBLISHED))
    ]
    tables = map(offload_table, reports)
    publish(reports, *tables, section="expert-offload", json=json, docs=docs)
