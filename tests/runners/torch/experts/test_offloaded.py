"""Whatever is computed where, and copied when, answers have the bits of a model that fits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from tiny_checkpoints import write_tiny

from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.torch.experts.assignment import ExpertCosts
from midfill.runners.torch.experts.offloaded import ExpertTraffic
from midfill.runners.torch.experts.routing import route
from midfill.runners.torch.runner import TorchRunner, load_torch_runner

EVEN = ExpertCosts(slow_start=0.1, slow_expert=0.1, slow_row=1.0, fast=0.5, copy=0.4)
NEVER_SLOW = ExpertCosts(slow_start=1e6, slow_expert=1e6, slow_row=1e6, fast=0.5, copy=0.4)
NEVER_COPY = ExpertCosts(slow_start=0.1, slow_expert=0.1, slow_row=0.1, fast=0.5, copy=1e6)
FAMILIES = ("qwen2moe", "qwen3moe", "deepseek2", "deepseekv3", "gpt-oss")


def runner_of(
    folder: Path,
    slots: int | None,
    costs: ExpertCosts = EVEN,
    lookahead: int = 3,
    device: str = "cpu",
) -> TorchRunner:
    runner = load_torch_runner(
        open_checkpoint(folder), slots=512, device=device, expert_slots=slots, expert_costs=costs
    )
    if runner.decoder.offloaded is not None:
        runner.decoder.offloaded.lookahead = lookahead
    return runner


def logits_of(runner: TorchRunner) -> list[np.ndarray]:
    """Return the logits of a prompt of 200 tokens, of some single ones, and of a mixed batch."""
    stepper = Stepper(runner)
    rng = np.random.default_rng(0)
    first, second = (Sequence(rng.integers(5, 200, 230).tolist()) for _ in range(2))
    steps = [[(first, 200)], *([[(first, 1)]] * 6), [(first, 3), (second, 40)], [(second, 1)]]
    ops = runner.logits_ops
    return [ops.to_numpy(runner.forward(stepper.pack(step))).copy() for step in steps]


def traffic_of(runner: TorchRunner) -> ExpertTraffic:
    assert runner.decoder.offloaded is not None
    return runner.decoder.offloaded.traffic


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_a_model_that_fits(family: str, tmp_path: Path) -> None:
    folder = write_tiny(family, tmp_path)
    expected = logits_of(runner_of(folder, None))
    for slots, costs, lookahead in (
        (0, EVEN, 3), (1, EVEN, 3), (3, EVEN, 0), (3, EVEN, 3), (5, NEVER_SLOW, 3),
        (5, NEVER_COPY, 3), (99, EVEN, 3),
    ):  # fmt: skip
        found = logits_of(runner_of(folder, slots, costs, lookahead))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestStreams:
    """Copies beside arithmetic: a race would show as other bits, in some run at least."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_what_the_gpu_computes_has_the_same_bits(self, family: str, tmp_path: Path) -> None:
        folder = write_tiny(family, tmp_path, hidden_size=512)
        expected = logits_of(runner_of(folder, None, device="cuda"))
        for slots, lookahead in ((1, 3), (2, 0), (3, 3), (3, 1)) * 3:
            found = logits_of(runner_of(folder, slots, NEVER_SLOW, lookahead, "cuda"))
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_both_devices_together_differ_by_rounding(self, family: str, tmp_path: Path) -> None:
        folder = write_tiny(family, tmp_path)
        expected = logits_of(runner_of(folder, None, device="cuda"))
        for slots in (0, 2, 5):
            found = logits_of(runner_of(folder, slots, EVEN, device="cuda"))
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-3)


class TestTraffic:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_tiny("qwen3moe", tmp_path)

    def test_nothing_is_copied_where_there_is_room_for_all(self, folder: Path) -> None:
        runner = runner_of(folder, 8, NEVER_SLOW)
        logits_of(runner)
        traffic = traffic_of(runner)
        assert (traffic.copied, traffic.prefetched, traffic.slow) == (0, 0, 0)
        assert traffic.held > 0

    def test_the_cpu_computes_everything_without_slots(self, folder: Path) -> None:
        runner = runner_of(folder, 0)
        logits_of(runner)
        assert traffic_of(runner) == ExpertTraffic(slow=traffic_of(runner).slow)

    @torch.inference_mode()
    def test_what_is_predicted_is_there_when_it_is_needed(self, folder: Path) -> None:
        costs = ExpertCosts(slow_start=1e6, slow_expert=1e6, slow_row=1e6, fast=10.0, copy=0.1)
        runner = runner_of(folder, 2, costs)
        offloaded, layers = runner.decoder.offloaded, runner.decoder.weights.layers
        assert offloaded is not None
        hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
        now, later = (
            route(runner.config.experts, layer.mlp, hidden)  # type: ignore[arg-type]
            for layer in layers[:2]
        )
        missing = set(later.chosen[0].tolist()) - set(offloaded._slots[1].held)
        assert missing
        offloaded.run(0, hidden, now, {1: later})
        assert missing <= set(offloaded._slots[1].held)
        assert offloaded.traffic.prefetched == len(missing)
        copied_before = offloaded.traffic.copied
        offloaded.run(1, hidden, later, {})
        assert offloaded.traffic.copied == copied_before

    def test_slots_hold_what_they_say(self, folder: Path) -> None:
        runner = runner_of(folder, 3)
        logits_of(runner)
        offloaded = runner.decoder.offloaded
        assert offloaded is not None
        for number, slots in offloaded._slots.items():
            experts = runner.decoder.weights.layers[number].mlp.experts
            for expert in slots.held:
                place = offloaded._places[number][slots.slot_of(expert)]
                assert torch.equal(place.mlp.up.weight, experts[expert].up.weight)
                assert torch.equal(place.mlp.down.weight, experts[expert].down.weight)


def test_costs_are_measured_where_none_are_given(tmp_path: Path) -> None:
    folder = write_tiny("qwen3moe", tmp_path)
    runner = load_torch_runner(open_checkpoint(folder), slots=16, expert_slots=2)
    assert runner.decoder.offloaded is not None
    costs = runner.decoder.offloaded._costs
    assert min(costs.fast, costs.copy, costs.slow(1)) > 0


def test_models_without_experts_have_none_to_offload(tmp_path: Path) -> None:
    runner = load_torch_runner(
        open_checkpoint(write_tiny("llama", tmp_path)), slots=16, expert_slots=2
    )
    assert runner.decoder.offloaded is None
