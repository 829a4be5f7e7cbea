"""OffloadedExperts: computes experts on the device and on the CPU, and copies them between steps.

Copies run on a stream of their own, beside the device's arithmetic and the CPU's. On a device
without streams they run at once; answers are the same.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from midfill.models.config import Experts
from midfill.runners.torch.experts.assignment import (
    LOOKAHEAD,
    Assignment,
    ExpertCosts,
    assign,
    ranked_copies,
)
from midfill.runners.torch.experts.routing import Routing
from midfill.runners.torch.experts.slots import ExpertScores, LayerSlots
from midfill.runners.torch.weights import Affine, ExpertWeights, MlpWeights

_MEASURED_ROWS = 16
_MEASUREMENTS = 3

Expand = Callable[[MlpWeights, torch.Tensor], torch.Tensor]
"""Computes an MLP of rows, where its weights are."""


@dataclass
class ExpertTraffic:
    """What has been done so far, in experts of a layer and step.

    Attributes:
        held: were on the device when they were needed.
        copied: were copied to it since they were needed.
        slow: were computed by the CPU, whether the device held them or not.
        prefetched: were copied since they were predicted.
    """

    held: int = 0
    copied: int = 0
    slow: int = 0
    prefetched: int = 0


@dataclass(frozen=True)
class ExpertOutput:
    """What one expert makes of the rows that it is sent.

    Attributes:
        rows, ranks: [n] int64, which rows, and as which of their experts.
        expanded: [n, hidden].
    """

    rows: torch.Tensor
    ranks: torch.Tensor
    expanded: torch.Tensor


class OffloadedExperts:
    """The experts of all layers in the machine's memory, and of each layer some on the device.

    Args:
        experts: of the model.
        layers: the mixtures by the number of their layer; their experts are in the machine's
            memory.
        device: the other one.
        slots: how many experts of each layer the device has room for.
        expand: computes an expert.
        costs: of an expert; None measures them.
        lookahead: how many later layers' experts are predicted; 0 copies none before it is needed.

    Attributes:
        traffic: what has been done so far.
    """

    def __init__(
        self,
        experts: Experts,
        layers: Mapping[int, ExpertWeights],
        device: torch.device,
        slots: int,
        expand: Expand,
        *,
        costs: ExpertCosts | None = None,
        lookahead: int = LOOKAHEAD,
    ) -> None:
        self._layers = layers
        self._device = device
        self._expand = expand
        self._bus = _Bus(device)
        self._places: dict[int, list[_Place]] = {}
        self._slots: dict[int, LayerSlots] = {}
        self.lookahead = lookahead
        self.traffic = ExpertTraffic()
        slots = min(slots, experts.count)
        chance = random.Random(0)
        for number, layer in layers.items():
            held = chance.sample(range(experts.count), slots)
            places = [_Place(_copy_of(layer.experts[expert], device)) for expert in held]
            scores = ExpertScores(experts.count, 2 * experts.per_token)
            self._places[number] = places
            self._slots[number] = LayerSlots(held, scores)
        self._costs = self._measured() if costs is None else costs

    def run(
        self, layer: int, hidden: torch.Tensor, routing: Routing, later: Mapping[int, Routing]
    ) -> list[ExpertOutput]:
        """Compute a layer's experts, and copy those that later layers may need.

        Args:
            layer: its number.
            hidden: [rows, hidden] on the device, normed.
            routing: what its router has chosen.
            later: what the routers of later layers would choose for the same rows.

        Returns:
            What experts make of their rows, by ascending expert.
        """
        # Together: each copy waits until the device has come so far.
        every = torch.stack([each.chosen for each in (routing, *later.values())]).cpu()
        shares = routing.shares.mean(dim=0).cpu().numpy()
        chosen, slots = every[0], self._slots[layer]
        slots.scores.update(shares)
        plan = assign(_loads(chosen), slots.held, len(slots), self._costs)
        self.traffic.held += len(plan.fast) - len(plan.copied)
        self.traffic.copied += len(plan.copied)
        self.traffic.slow += len(plan.slow)
        near = hidden.cpu() if plan.slow else hidden
        outputs: dict[int, ExpertOutput] = {}
        # All of it is only queued, on a device that computes beside the CPU.
        for operation, expert in slots.operations(plan.fast, plan.copied):
            place = self._places[layer][slots.slot_of(expert)]
            if operation == "copy":
                self._bus.copy(self._layers[layer].experts[expert], place)
                continue
            rows, ranks = (each.to(self._device) for each in torch.where(chosen == expert))
            self._bus.await_copy(place)
            outputs[expert] = ExpertOutput(rows, ranks, self._expand(place.mlp, hidden[rows]))
            self._bus.mark_read(place)
        self._prefetch(plan, dict(zip(later, map(_loads, every[1:]), strict=True)))
        for expert in plan.slow:
            rows, ranks = torch.where(chosen == expert)
            expanded = self._expand(self._layers[layer].experts[expert], near[rows])
            moved = (each.to(self._device) for each in (rows, ranks, expanded))
            outputs[expert] = ExpertOutput(*moved)
        return [outputs[expert] for expert in sorted(outputs)]

    def _prefetch(self, plan: Assignment, later: Mapping[int, Mapping[int, int]]) -> None:
        """Copy the experts that later layers gain most from, while this layer leaves the bus idle.

        Args:
            plan: of this layer.
            later: how many rows each expert of later layers is predicted to be sent.
        """
        room = plan.idle_copies(self._costs)
        layers = {layer: (rows, self._slots[layer]) for layer, rows in later.items()}
        for layer, expert in ranked_copies(layers, self._costs) if room else ():
            slot = self._slots[layer].take(expert, later[layer]) if room else None
            if slot is not None:
                self._bus.copy(self._layers[layer].experts[expert], self._places[layer][slot])
                self.traffic.prefetched += 1
                room -= 1

    def _measured(self) -> ExpertCosts:
        """Measure what an expert costs on this machine."""
        layer = next(iter(self._layers))
        source = self._layers[layer].experts[0]
        hidden = source.down.weight.new_zeros(_MEASURED_ROWS, source.down.weight.shape[0])
        one, several = (
            _seconds(partial(self._expand, source, hidden[:rows]), self._device)
            for rows in (1, _MEASURED_ROWS)
        )
        per_row = max(several - one, 0.0) / (_MEASURED_ROWS - 1)
        place = _Place(_copy_of(source, self._device))
        near = hidden[:1].to(self._device)
        return ExpertCosts(
            slow_start=_seconds(partial(_to_host, near), self._device),
            slow_expert=max(one - per_row, 0.0),
            slow_row=per_row,
            fast=_seconds(partial(self._expand, place.mlp, near), self._device),
            copy=_seconds(partial(self._bus.copy, source, place), self._device),
        )


@dataclass
class _Place:
    """A slot's memory on the device, and until when others use it.

    Attributes:
        mlp: the expert in it.
        copied, read: the last copy into it, and the last step that reads it; None on a device
            without streams.
    """

    mlp: MlpWeights
    copied: torch.cuda.Event | None = None
    read: torch.cuda.Event | None = None


class _Bus:
    """Copies experts to the device on a stream of its own, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, source: MlpWeights, place: _Place) -> None:
        """Begin to copy an expert into a place, once nobody reads what is there."""
        pairs = list(zip(_tensors(source), _tensors(place.mlp), strict=True))
        if self._stream is None:
            for tensor, target in pairs:
                target.copy_(tensor)
            return
        with torch.cuda.stream(self._stream):
            if place.read is not None:
                self._stream.wait_event(place.read)
            for tensor, target in pairs:
                target.copy_(tensor, non_blocking=True)
            place.copied = self._stream.record_event()

    def await_copy(self, place: _Place) -> None:
        """Let what the device computes next wait until a place is filled."""
        if self._stream is not None and place.copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(place.copied)

    def mark_read(self, place: _Place) -> None:
        """Let the next copy into a place wait for what the device was given so far."""
        if self._stream is not None:
            place.read = torch.cuda.current_stream(self._stream.device).record_event()


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    return rows.to("cpu", copy=True)


def _loads(chosen: torch.Tensor) -> dict[int, int]:
    """Return how many rows each expert is sent, for those that are sent any."""
    experts, counts = torch.unique(chosen, return_counts=True)
    return dict(zip(experts.tolist(), counts.tolist(), strict=True))


def _affines(mlp: MlpWeights) -> Sequence[Affine]:
    return mlp.up, mlp.down


def _tensors(mlp: MlpWeights) -> list[torch.Tensor]:
    parts = ((affine.weight, affine.bias) for affine in _affines(mlp))
    return [tensor for pair in parts for tensor in pair if tensor is not None]


def _copy_of(mlp: MlpWeights, device: torch.device) -> MlpWeights:
    """Return a copy on a device, in memory of its own."""

    def copied(affine: Affine) -> Affine:
        bias = None if affine.bias is None else affine.bias.to(device, copy=True)
        return Affine(affine.weight.to(device, copy=True), bias)

    return MlpWeights(copied(mlp.up), copied(mlp.down))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes, in the median of a few after the first."""

    def once() -> float:
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(_MEASUREMENTS))
