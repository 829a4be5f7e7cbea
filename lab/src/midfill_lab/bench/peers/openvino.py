"""OpenVINO GenAI on the CPU: the interpreter that has it, and how a server of it is started."""

from math import ceil
from pathlib import Path

from midfill_lab.bench.peers.interpreters import find_interpreter
from midfill_lab.bench.peers.loads import LAID_OUT
from midfill_lab.bench.peers.results import OPENVINO
from midfill_lab.bench.peers.servers import PORT, ComparedModel, Launch, Missing, ReadBytes, Room

INSTALL = (
    "install it with python -m venv openvino && openvino/bin/pip install openvino-genai, and name"
    " it with --openvino openvino/bin/python"
)
_PROGRAM = Path(__file__).with_name("openvino_server.py")
_STEP_TOKENS = 4096
"""A prompt is computed at once: in steps of 256 tokens, its default, prefill is slower."""


def launch_openvino(model: ComparedModel, room: Room, python: Path | None) -> Launch | Missing:
    """Describe a server of OpenVINO GenAI's continuous batching, with its prefix cache.

    Args:
        python: an interpreter that has openvino-genai; None tries this one.
    """
    if model.gguf is None:
        return Missing(OPENVINO, f"is measured on GGUF files, and {model.name} is none")
    found = find_interpreter(python, "openvino-genai", "openvino_genai")
    if found is None:
        hint = "not found" if python is None else f"{python} does not have it"
        return Missing(OPENVINO, f"{hint}; {INSTALL}")
    interpreter, version = found
    kv_bytes = model.kv_values_per_token  # int8 by default; its scales are few
    gigabytes = ceil(room.kv_tokens * 2 * kv_bytes / 2**30)
    sizes = [room.threads, gigabytes, max(_STEP_TOKENS, room.sequence), room.sequences]
    # As text: run as a file, its own folder's modules would hide others of their names.
    program = [interpreter, "-c", _PROGRAM.read_text("utf-8")]
    return Launch(
        name=OPENVINO,
        version=version,
        precision=f"weights {model.stored_kinds} as read from the file, activations and KV int8",
        settings=f"{room.threads} threads, {gigabytes} GB of KV, {sizes[2]:,} tokens per step",
        command=[*program, str(model.gguf.resolve()), PORT, *map(str, sizes)],
        layouts=LAID_OUT,
        read_bytes=lambda _: ReadBytes(model.stored_bytes_read, kv_bytes),
    )
