"""Loading: which runner a checkpoint gets, and how many KV slots fit."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from tiny_checkpoints import write_tiny, write_variant

from midfill.config import ModelOptions
from midfill.errors import CheckpointError, MidfillError, OptionError
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners import loading
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.cpu.weight_packing import packed_size
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from midfill.runners.loading import (
    ExpertRoom,
    choose_expert_slots,
    choose_slots,
    choose_states,
    load_runner,
    max_running,
    offloads_experts,
    options_for_device,
)
from midfill.system.machine import available_memory

SLOT_BYTES = 3 * 2 * 32 * 2 * 4  # layers, KV heads, head_dim, K and V, float32
KV_MEMORY = 100 * SLOT_BYTES


@pytest.mark.parametrize(
    ("backend", "described"),
    [
        ("auto", "CPU kernels, 1 thread"),
        ("cpu", "CPU kernels, 1 thread"),
        ("torch", "PyTorch on cpu"),
    ],
)
def test_a_backend_is_what_was_asked_for(tiny_folder: Path, backend: str, described: str) -> None:
    options = ModelOptions(backend=backend, device="cpu", threads=1, kv_memory=KV_MEMORY)  # type: ignore[arg-type]
    runner = load_runner(open_checkpoint(tiny_folder), options)
    assert runner.description == described
    assert (runner.slots, runner.kv_bytes) == (100, KV_MEMORY)


def test_shapes_the_kernels_cant_run_go_to_torch(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path, intermediate_size=100))
    options = ModelOptions(kv_memory=KV_MEMORY, device="cpu")
    assert load_runner(checkpoint, options).description == "PyTorch on cpu"
    with pytest.raises(CheckpointError, match="--backend torch"):
        load_runner(checkpoint, ModelOptions(backend="cpu", kv_memory=KV_MEMORY))


@pytest.mark.parametrize("driver", [False, True])
def test_torch_is_asked_for_a_gpu_only_where_one_has_a_driver(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    asked = []
    made = types.ModuleType("torch")
    made.cuda = types.SimpleNamespace(is_available=lambda: asked.append(1))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(loading, "has_gpu_driver", lambda: driver)
    options = ModelOptions(threads=1, kv_memory=KV_MEMORY)
    assert isinstance(load_runner(open_checkpoint(tiny_folder), options), CpuRunner)
    assert bool(asked) == driver


@pytest.mark.parametrize(
    ("options", "intermediate", "what"),
    [
        (ModelOptions(backend="torch"), 128, "--backend torch"),
        (ModelOptions(device="cuda:1"), 128, "--device cuda:1"),
        (ModelOptions(device="cpu"), 100, "this model (ffn = 100 is not a multiple of 32)"),
    ],
)
def test_without_torch_one_line_says_how_to_install_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: ModelOptions,
    intermediate: int,
    what: str,
) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path, intermediate_size=intermediate))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MidfillError) as caught:
        load_runner(checkpoint, options)
    assert str(caught.value) == f"{what} needs torch; install it with: pip install 'midfill[torch]'"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (ModelOptions(context=513), "--context 513 .* 512 tokens"),
        (ModelOptions(backend="cpu", device="cuda"), "--device cuda needs --backend torch"),
        (ModelOptions(backend="torch", device="cuda:99"), "--device 'cuda:99' .* try 'cpu'"),
        (ModelOptions(kv_memory=1 << 50), "--kv-memory .* is more than .* that are free"),
        (ModelOptions(kv_memory=10 * SLOT_BYTES), f"--kv-memory .* at least {16 * SLOT_BYTES},"),
    ],
)
def test_options_that_cant_be_met(tiny_folder: Path, options: ModelOptions, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        load_runner(open_checkpoint(tiny_folder), options)


def test_too_little_free_memory_is_no_fault_of_an_option(tiny_folder: Path) -> None:
    config = open_checkpoint(tiny_folder).config
    with pytest.raises(MidfillError, match="free memory, 1000 bytes") as caught:
        choose_slots(config, ModelOptions(), 1000, SLOT_BYTES)
    assert not isinstance(caught.value, OptionError)


def test_the_pool_takes_a_share_of_what_is_free_up_to_what_is_useful(tiny_folder: Path) -> None:
    config = open_checkpoint(tiny_folder).config
    assert choose_slots(config, ModelOptions(), 1000 * SLOT_BYTES, SLOT_BYTES) == 1000
    assert choose_slots(config, ModelOptions(), 1e12, SLOT_BYTES) == 16 * config.context
    assert choose_slots(config, ModelOptions(context=64), 1e12, SLOT_BYTES) == 16 * 64
    assert choose_slots(config, ModelOptions(kv_memory=50 * SLOT_BYTES), 1e12, SLOT_BYTES) == 50


class TestWeightsBeyondTheMemory:
    def offloads(self, folder: Path, free: float | None, **options: object) -> bool:
        """Return whether experts stay on disk with so much free memory, in the weights' sizes."""
        checkpoint = open_checkpoint(folder)
        size = packed_size(checkpoint)
        free_bytes = None if free is None else int(free * size.total / 0.95) + 1
        return offloads_experts(checkpoint, ModelOptions(**options), size, free_bytes)  # type: ignore[arg-type]

    @pytest.fixture
    def mixture(self, tmp_path: Path) -> Path:
        return write_tiny("qwen3moe", tmp_path / "mixture")

    def test_experts_stay_on_disk_where_the_others_fit(self, mixture: Path) -> None:
        size = packed_size(open_checkpoint(mixture))
        others = 1 - size.experts / size.total
        assert not self.offloads(mixture, 1.0)
        assert self.offloads(mixture, 0.99)
        assert self.offloads(mixture, others)
        with pytest.raises(MidfillError, match="weights have to be in memory"):
            self.offloads(mixture, others * 0.99)

    def test_it_can_be_asked_for_and_refused(self, mixture: Path, tiny_folder: Path) -> None:
        assert self.offloads(mixture, 1.0, expert_offload="on")
        with pytest.raises(MidfillError, match="are missing"):
            self.offloads(mixture, 0.99, expert_offload="off")
        with pytest.raises(OptionError, match="has no experts; leave it out"):
            self.offloads(tiny_folder, 1.0, expert_offload="on")

    def test_nothing_is_refused_where_the_system_says_nothing(self, tiny_folder: Path) -> None:
        assert not self.offloads(tiny_folder, None)

    def test_one_line_says_what_is_missing_and_what_would_fit(self, tiny_folder: Path) -> None:
        with pytest.raises(MidfillError) as caught:
            self.offloads(tiny_folder, 0.5)
        assert re.fullmatch(
            r"\S+: [\d.]+ KB of weights have to be in memory, and [\d.]+ KB are free for them: "
            r"[\d.]+ KB are missing; --weights q4 takes [\d.]+ KB",
            str(caught.value),
        )
        with pytest.raises(MidfillError, match="a smaller model, or a file with fewer bits"):
            self.offloads(tiny_folder, 0.01)
        with pytest.raises(MidfillError, match="0 bytes are free for them beside --kv-memory 1 GB"):
            self.offloads(tiny_folder, 1.0, kv_memory=2**30)

    def test_a_model_on_disk_answers_as_one_in_memory(
        self, mixture: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = ModelOptions(backend="cpu", threads=1, context=128)
        runner = load_runner(open_checkpoint(mixture), options)
        size = packed_size(open_checkpoint(mixture))
        monkeypatch.setattr(loading, "reported_memory", lambda: size.total)
        on_disk = load_runner(open_checkpoint(mixture), options)
        assert np.array_equal(logits_of(runner), logits_of(on_disk))
        assert on_disk.weight_bytes == runner.weight_bytes
        assert on_disk.description == "CPU kernels, 1 thread, experts on disk"


def logits_of(runner: Runner) -> np.ndarray:
    """Return the logits after five tokens."""
    rows = np.arange(5, dtype=np.int32)
    ends = np.array([0, 5], np.int32)
    last = np.array([4], np.int32)
    logits = runner.forward(ForwardBatch(rows + 3, rows, rows, ends, ends, rows, last))
    return np.array(logits)


def test_the_precision_of_kv_is_chosen(tiny_folder: Path) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    # int8 keeps a scale (4 bytes) per 32 quants of a token and head.
    for kv_cache_dtype, slots in (
        ("f32", 100),
        ("f16", 200),
        ("bf16", 200),
        ("i8", 100 * 128 // 36),
    ):
        options = ModelOptions(
            backend="cpu", threads=1, kv_memory=KV_MEMORY, kv_cache_dtype=kv_cache_dtype
        )  # type: ignore[arg-type]
        assert load_runner(checkpoint, options).slots == slots


def test_there_is_memory() -> None:
    assert 2**20 < available_memory() < 2**50


def test_states_take_half_of_the_memory_and_answers_half_of_the_states(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("granitehybrid", tmp_path))
    space = checkpoint.config.state_space
    assert space is not None
    memory = 21 * space.state_bytes
    options = ModelOptions(kv_memory=memory, threads=1, device="cpu", backend="torch")
    runner = load_runner(checkpoint, options)
    assert runner.states is not None
    assert runner.states.nbytes == 10 * space.state_bytes
    slot = 2 * 2 * 32 * 4  # of one layer with attention: K and V, heads, numbers, bytes
    assert runner.slots == 11 * space.state_bytes // slot
    assert memory - slot < runner.kv_bytes <= memory
    assert max_running(options, 10) == 5
    few = ModelOptions(max_running=3, kv_memory=memory)
    assert choose_states(checkpoint.config, few, 0) == 6
    assert max_running(few, 6) == 3


def test_memory_for_too_few_states_is_one_clear_line(tmp_path: Path, tiny_folder: Path) -> None:
    config = open_checkpoint(write_variant("granitehybrid", tmp_path)).config
    assert config.state_space is not None
    size = config.state_space.state_bytes
    with pytest.raises(
        OptionError, match=f"--kv-memory, {6 * size} bytes, .* at least {8 * size} bytes"
    ):
        choose_states(config, ModelOptions(kv_memory=6 * size), 0)
    with pytest.raises(OptionError, match="the free memory, 100 bytes, holds 0 states"):
        choose_states(config, ModelOptions(), 100)
    assert choose_states(open_checkpoint(tiny_folder).config, ModelOptions(), 100) == 0


class TestExpertsBeyondTheDevice:
    ONE = 4 * 3 * 64 * 96 * 3
    """Bytes of one expert of each of three layers, in float32."""

    @pytest.fixture
    def mixture(self, tmp_path: Path) -> Path:
        return write_tiny("qwen3moe", tmp_path / "mixture")

    def test_the_device_has_room_for_whole_experts(self, mixture: Path) -> None:
        checkpoint = open_checkpoint(mixture)
        for memory, slots in (
            (0, 0), (self.ONE - 1, 0), (3 * self.ONE, 3), (99 * self.ONE, 8),
        ):  # fmt: skip
            room = choose_expert_slots(checkpoint, memory, 4)
            assert room == ExpertRoom(slots, (8 - slots) * self.ONE)
        assert choose_expert_slots(checkpoint, None, 4) is None

    def test_answers_are_the_same(self, mixture: Path) -> None:
        options = ModelOptions(backend="torch", device="cpu", kv_memory=4_000_000)
        some = msgspec.structs.replace(options, expert_memory=2 * self.ONE)
        runners = [load_runner(open_checkpoint(mixture), each) for each in (options, some)]
        plain, offloaded = (Stepper(each) for each in runners)
        found = [
            np.array(each.runner.forward(each.pack([(Sequence(list(range(5, 45))), 40)])))
            for each in (plain, offloaded)
        ]
        np.testing.assert_array_equal(*found)
        assert runners[1].decoder.offloaded is not None  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (ModelOptions(backend="torch", device="cpu", expert_memory=1), "has no experts"),
            (ModelOptions(backend="cpu", expert_memory=1), "needs --backend torch"),
        ],
    )
    def test_one_line_says_where_it_makes_no_sense(
        self, tiny_folder: Path, options: ModelOptions, problem: str
    ) -> None:
        with pytest.raises(OptionError, match=f"--expert-memory.*{problem}"):
            load_runner(open_checkpoint(tiny_folder), options)

    def test_one_line_says_what_the_machines_memory_lacks(
        self, mixture: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("midfill.runners.loading.available_memory", lambda: 1000)
        with pytest.raises(MidfillError, match=r"its experts take .* and 0\.977 KB are free"):
            choose_expert_slots(open_checkpoint(mixture), 0, 4)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (ModelOptions(device="cuda:1"), (2048, 512)),
        (ModelOptions(device="cuda:1", token_budget=64), (64, 16)),
        (ModelOptions(device="cuda:1", offline_token_budget=7), (2048, 7)),
        (ModelOptions(device="cpu"), (128, 16)),
    ],
)
def test_steps_have_more_tokens_on_a_gpu(options: ModelOptions, tokens: tuple[int, int]) -> None:
    chosen = options_for_device(options)
    assert (chosen.step_tokens, chosen.offline_step_tokens) == tokens
