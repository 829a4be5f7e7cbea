"""load_runner: choose the implementation that runs a checkpoint, and its number of KV slots."""

import math
import os
from dataclasses import dataclass

import msgspec

from midfill.config import ModelOptions
from midfill.errors import MidfillError, OptionError
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.compile_ahead import compile_ahead
from midfill.runners.cpu.packed_model import load_packed, unsupported_reason
from midfill.runners.cpu.runner import (
    CpuRunner,
    choose_kv_cache_dtype,
    slot_bytes,
    usual_kv_cache_dtype,
)
from midfill.runners.cpu.weight_packing import PackedSize, packed_size
from midfill.runners.forward.runner import Runner
from midfill.system.extras import require
from midfill.system.machine import (
    available_memory,
    available_threads,
    format_size,
    has_gpu_driver,
    reported_memory,
)
from midfill.system.progress import Progress

_MAX_CONTEXTS = 16
"""A prefix cache of more full contexts is not worth its memory."""
_CPU_SHARE = 0.25
"""Of the free memory: other programs use the machine too."""
_GPU_SHARE = 0.85
"""Of the memory that the weights leave; the rest is for activations."""
_LEFT_SHARE = 0.5
"""Of the memory that the weights leave, at most, for KV."""
_WEIGHTS_SHARE = 0.95
"""Of the free memory that weights may take: a step needs some, too."""
_MIN_SLOTS = 16
"""Fewer are taken for a mistake: no prompt fits."""
_STATE_SHARE = 0.5
"""Of the KV memory, in models with states: a snapshot is as large as the KV of some thousand tokens
and saves computing at least as many."""
_MIN_STATES = 4
_GPU_STEP_TOKENS = 2048
_GPU_OFFLINE_STEP_TOKENS = 512
"""A GPU computes some hundred rows in the time of one."""


def load_runner(
    checkpoint: Checkpoint, options: ModelOptions, progress: Progress | None = None
) -> Runner:
    """Load a checkpoint's weights and allocate its KV cache.

    Args:
        checkpoint: the model.
        options: how the model is run.
        progress: called with (stage, done, total).

    Raises:
        CheckpointError: the checkpoint is broken or has a shape the backend can't run.
        OptionError: options that can't be met.
        MidfillError: too little memory is free, or torch is needed and not installed.
    """
    config = checkpoint.config
    if options.context is not None and not 0 < options.context <= config.context:
        raise OptionError(
            f"--context {options.context} is not possible: this model's context is"
            f" {config.context} tokens; give at most that"
        )
    if options.backend == "cpu" and options.device not in (None, "cpu"):
        raise OptionError(f"--device {options.device} needs --backend torch")
    device = _device(options)
    reason = unsupported_reason(config)
    if options.latent_parts is not None:
        return _load_latent_parts(checkpoint, options, device)
    if options.backend == "torch" or (options.backend == "auto" and (device != "cpu" or reason)):
        what = f"--device {device}" if reason is None else f"this model ({reason})"
        what = "--backend torch" if options.backend == "torch" else what
        require(what, ["torch"], extra="torch")
        return _load_torch(checkpoint, options, device)
    return _load_cpu(checkpoint, options, progress)


def _load_cpu(
    checkpoint: Checkpoint, options: ModelOptions, progress: Progress | None
) -> CpuRunner:
    config = checkpoint.config
    if options.expert_memory is not None:
        raise OptionError(
            "--expert-memory needs --backend torch; the CPU kernels leave experts on disk where"
            " they don't fit (--expert-offload)"
        )
    kv_cache_dtype = choose_kv_cache_dtype(checkpoint, options.weights, options.kv_cache_dtype)
    free = available_memory()
    check_kv_memory(options.kv_memory, free)
    size = packed_size(checkpoint, options.weights)
    offload = offloads_experts(checkpoint, options, size, reported_memory())
    held = size.total - size.experts if offload else size.total
    for_kv = min(free * _CPU_SHARE, max(free - held, 0) * _LEFT_SHARE)
    states = choose_states(config, options, for_kv)
    slots = choose_slots(config, options, for_kv, slot_bytes(config, kv_cache_dtype), states)
    return CpuRunner(
        config,
        load_packed(checkpoint, options.weights, progress, offload_experts=offload),
        kv_cache_dtype,
        slots=slots,
        states=states,
        threads=options.threads,
        max_rows=max(options.step_tokens, options.max_running),
        progress=progress,
    )


def offloads_experts(
    checkpoint: Checkpoint, options: ModelOptions, size: PackedSize, free_bytes: int | None
) -> bool:
    """Return whether a model's experts stay on disk.

    Args:
        checkpoint: the model.
        options: ``expert_offload``, ``kv_memory`` and ``weights`` are used.
        size: of the packed weights.
        free_bytes: memory that is free; None if nobody knows.

    Raises:
        OptionError: experts are to stay on disk, and there are none.
        MidfillError: what has to be in memory doesn't fit.
    """
    if options.expert_offload == "on" and not size.experts:
        raise OptionError("--expert-offload on: this model has no experts; leave it out")
    if free_bytes is None:
        return options.expert_offload == "on"
    room = int(free_bytes * _WEIGHTS_SHARE) - (options.kv_memory or 0)
    may_offload = size.experts > 0 and options.expert_offload != "off"
    if size.total <= room:
        return options.expert_offload == "on"
    if may_offload and size.total - size.experts <= room:
        return True
    needed = size.total - (size.experts if may_offload else 0)
    raise MidfillError(_too_large(checkpoint, options, needed, room))


def _too_large(checkpoint: Checkpoint, options: ModelOptions, needed: int, room: int) -> str:
    """Return one line that says how much memory is missing, and what would fit."""
    advice = "a smaller model, or a file with fewer bits per weight, may fit"
    if options.weights != "q4" and packed_size(checkpoint, "q4").total <= room:
        advice = f"--weights q4 takes {format_size(packed_size(checkpoint, 'q4').total)}"
    kv = (
        "" if options.kv_memory is None else f" beside --kv-memory {format_size(options.kv_memory)}"
    )
    return (
        f"{checkpoint.path.name}: {format_size(needed)} of weights have to be in memory, and"
        f" {format_size(max(room, 0))} are free for them{kv}: {format_size(needed - room)} are"
        f" missing; {advice}"
    )


def prepare_runner(options: ModelOptions, progress: Progress | None = None) -> None:
    """Do what a runner's loading takes and needs no model for: compile the CPU kernels.

    They may be others than a model turns out to need: one with float32 weights has another KV
    format.

    Args:
        options: how the model will be run.
        progress: called with (stage, done, total).
    """
    if options.backend == "torch" or options.device not in (None, "cpu") or _finds_gpu(options):
        return
    if options.latent_parts is not None:
        return
    exact = options.weights == "f32" and options.kv_cache_dtype == "auto"
    kv_cache_dtype = KVCacheDtype.F32 if exact else usual_kv_cache_dtype(options.kv_cache_dtype)
    adapted = options.adapter is not None
    compile_ahead(kv_cache_dtype, options.threads, progress, adapted=adapted)


def check_kv_memory(kv_memory: int | None, free_bytes: int) -> None:
    """Refuse a KV pool for which there is not enough memory.

    Raises:
        OptionError: there is not.
    """
    if kv_memory is not None and kv_memory > free_bytes:
        raise OptionError(
            f"--kv-memory {format_size(kv_memory)} is more than the {format_size(free_bytes)} of"
            " memory that are free; give less, or leave it out"
        )


def choose_states(config: ModelConfig, options: ModelOptions, free_bytes: float) -> int:
    """Return the number of states of sequences and snapshots; 0 for models without.

    Args:
        config: the model.
        options: ``kv_memory``, ``memory_share`` and ``max_running`` are used.
        free_bytes: what KV and states may take if ``kv_memory`` is not set.

    Raises:
        OptionError: the memory holds too few.
    """
    space = config.state_space
    if space is None:
        return 0
    room = options.kv_memory or int(free_bytes * options.memory_share)
    states = int(room * _STATE_SHARE) // space.state_bytes
    if states < _MIN_STATES:
        least = memory_with_states(config, 1)
        what = "the free memory" if options.kv_memory is None else "--kv-memory"
        raise OptionError(
            f"{what}, {room} bytes, holds {states} states of this model, at {space.state_bytes}"
            f" bytes per sequence or snapshot; it takes at least {least} bytes, half of them for KV"
        )
    return min(states, 2 * options.max_running)


def memory_with_states(config: ModelConfig, running: int) -> int:
    """Return the least bytes of ``--kv-memory`` with which so many sequences run at a time.

    0 for models without states.
    """
    space = config.state_space
    if space is None:
        return 0
    return int(max(2 * running, _MIN_STATES) * space.state_bytes / _STATE_SHARE)


def max_running(options: ModelOptions, states: int) -> int:
    """Return how many sequences may run where each has one of so many states.

    At least as many states are left for snapshots.
    """
    return min(options.max_running, states // 2)


def choose_slots(
    config: ModelConfig,
    options: ModelOptions,
    free_bytes: float,
    slot_bytes: int,
    states: int = 0,
) -> int:
    """Return the number of KV slots for ``options.kv_memory``, or for the free memory.

    Args:
        config: the model.
        options: ``kv_memory``, ``memory_share`` and ``context`` are used.
        free_bytes: what the KV cache may take if ``kv_memory`` is not set.
        slot_bytes: bytes of one token's KV.
        states: how many states take some of that memory.

    Raises:
        OptionError: ``kv_memory`` holds no useful number of tokens.
        MidfillError: the free memory holds none.
    """
    context = options.context or config.context
    taken = 0 if config.state_space is None else states * config.state_space.state_bytes
    if options.kv_memory is not None:
        slots = (options.kv_memory - taken) // slot_bytes
    else:
        room = int(free_bytes * options.memory_share) - taken
        slots = min(room // slot_bytes, _MAX_CONTEXTS * context)
    if slots >= _MIN_SLOTS:
        return slots
    held = f"KV of {slots} tokens of this model, at {slot_bytes} bytes each"
    if options.kv_memory is not None:
        raise OptionError(
            f"--kv-memory {options.kv_memory} holds {held}; give at least"
            f" {_MIN_SLOTS * slot_bytes}, better many times that"
        )
    raise MidfillError(
        f"the free memory, {int(free_bytes)} bytes, holds {held}; free some, or name the KV's size"
        " with --kv-memory"
    )


def options_for_device(options: ModelOptions) -> ModelOptions:
    """Return the options with more tokens per step on a GPU, where they don't say how many."""
    if options.token_budget is not None or not _device(options).startswith("cuda"):
        return options
    return msgspec.structs.replace(
        options, token_budget=_GPU_STEP_TOKENS,
        offline_token_budget=options.offline_token_budget or _GPU_OFFLINE_STEP_TOKENS,
    )  # fmt: skip


def _device(options: ModelOptions) -> str:
    return options.device or ("cuda" if _finds_gpu(options) else "cpu")


def _finds_gpu(options: ModelOptions) -> bool:
    """Whether torch could run the model on a GPU. It is imported only where there may be one."""
    if options.backend == "cpu" or not has_gpu_driver():
        return False
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


def _load_torch(checkpoint: Checkpoint, options: ModelOptions, device: str) -> Runner:
    import torch

    from midfill.runners.torch.runner import CAPTURED_ROWS, load_torch_runner

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    experts = choose_expert_slots(checkpoint, options.expert_memory, dtype.itemsize)
    if device.startswith("cuda"):
        free = _free_on_gpu(device)
        weights = sum(math.prod(checkpoint.tensor(name).shape) for name in checkpoint.names())
        held = weights * dtype.itemsize - (0 if experts is None else experts.left_out)
        check_kv_memory(options.kv_memory, free)
        budget = (free - held) * _GPU_SHARE
    else:
        free = available_memory()
        check_kv_memory(options.kv_memory, free)
        budget = free * _CPU_SHARE
    config = checkpoint.config
    entry = config.vectors_per_cell * config.head_dim * dtype.itemsize
    token_bytes = len(config.kv_layers) * config.kv_heads * entry
    states = choose_states(config, options, budget)
    slots = choose_slots(config, options, budget, token_bytes, states)
    return load_torch_runner(
        checkpoint, slots=slots, states=states, device=device, dtype=dtype,
        expert_slots=None if experts is None else experts.slots,
        captured_rows=() if options.enforce_eager else CAPTURED_ROWS,
    )  # fmt: skip


def _load_latent_parts(checkpoint: Checkpoint, options: ModelOptions, device: str) -> Runner:
    """Load a model whose latents are kept in parts; ``--kv-memory`` is that of each part."""
    parts = check_latent_parts(checkpoint.config, options)
    require("--latent-parts", ["torch"], extra="torch")
    import torch

    from midfill.runners.torch.latent_parts.messages import PartShape
    from midfill.runners.torch.latent_parts.part import part_config
    from midfill.runners.torch.latent_parts.runner import LatentPartsRunner

    device, gpus = device.partition(":")[0], torch.cuda.device_count()
    if device not in ("cpu", "cuda"):
        raise OptionError(f"--latent-parts needs --device cpu or cuda, not {device}")
    if device == "cuda" and gpus < parts:
        raise OptionError(
            f"--latent-parts {parts}: each part takes a GPU, and {gpus} are there; give fewer, or"
            " --device cpu"
        )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda":
        free = min(_free_on_gpu(f"cuda:{part}") for part in range(parts))
        weights = sum(math.prod(checkpoint.tensor(name).shape) for name in checkpoint.names())
        budget = (free - weights * dtype.itemsize) * _GPU_SHARE
    else:
        free = available_memory() // parts
        budget = free * _CPU_SHARE
    check_kv_memory(options.kv_memory, free)
    config = part_config(checkpoint.config, parts)
    slots = choose_slots(config, options, budget, config.layers * config.head_dim * dtype.itemsize)
    threads = options.threads or max(1, available_threads() // parts)
    shape = PartShape(parts, slots, device, dtype, threads)
    return LatentPartsRunner(checkpoint, shape, options.adapter_path, options.weights)


def check_latent_parts(config: ModelConfig, options: ModelOptions) -> int:
    """Return into how many parts a model's latents are cut.

    Raises:
        OptionError: they can't be, or not beside another option.
    """
    parts, latent = options.latent_parts, config.latent
    assert parts is not None
    if latent is None:
        raise OptionError(
            "--latent-parts: this model has no latent attention, as DeepSeek-V2 and V3 have;"
            " leave it out"
        )
    if options.backend == "cpu":
        raise OptionError("--latent-parts needs --backend torch")
    if os.name == "nt":
        raise OptionError("--latent-parts is not possible on Windows; leave it out")
    if options.expert_memory is not None:
        raise OptionError(
            "--latent-parts and --expert-memory can't stand together; leave one of them out"
        )
    if latent.rank % (2 * parts):
        possible = [str(n) for n in range(2, latent.rank // 2 + 1) if latent.rank % (2 * n) == 0]
        raise OptionError(
            f"--latent-parts {parts}: this model's latents have {latent.rank} numbers, which so"
            f" many parts can't share evenly, in pairs; give {_any_of(possible[:4])}"
        )
    return parts


def _any_of(values: list[str]) -> str:
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class ExpertRoom:
    """What a device has room for of a mixture's experts.

    Attributes:
        slots: experts of each layer.
        left_out: bytes of the weights that stay in the machine's memory alone.
    """

    slots: int
    left_out: int


def choose_expert_slots(
    checkpoint: Checkpoint, expert_memory: int | None, element_bytes: int
) -> ExpertRoom | None:
    """Return what the device has room for; None if nothing is offloaded.

    Args:
        checkpoint: the model.
        expert_memory: see ``ModelOptions``.
        element_bytes: of a weight on the device.

    Raises:
        OptionError: the model has no experts.
        MidfillError: the machine's memory doesn't hold them.
    """
    if expert_memory is None:
        return None
    config = checkpoint.config
    if config.experts is None:
        raise OptionError("--expert-memory: this model has no experts; leave it out")
    sizes = [
        math.prod(checkpoint.tensor(name).shape)
        for name in checkpoint.names()
        if ".experts." in name
    ]
    total, free = sum(sizes) * element_bytes, available_memory()
    if total > free:
        raise MidfillError(
            f"{checkpoint.path.name}: its experts take {format_size(total)} of the machine's"
            f" memory, and {format_size(free)} are free: {format_size(total - free)} are missing"
        )
    per_slot = total // config.experts.count  # one expert of each layer
    slots = min(expert_memory // per_slot, config.experts.count)
    return ExpertRoom(slots, total - slots * per_slot)


def _free_on_gpu(device: str) -> int:
    import torch

    try:
        return torch.cuda.mem_get_info(torch.device(device))[0]
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"--device {device!r} can't be used ({reason}); try 'cpu'") from error
