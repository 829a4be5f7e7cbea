"""midfill's programs on an emulated ARM chip: Debian's Python for arm64 runs under QEMU.

Python and its libraries are unpacked into the cache folder, in the versions of this environment.
Nothing is installed on the system, and no right of an administrator is needed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock

from midfill.system.cache import cache_folder
from midfill.system.pip import run_pip

QEMU = "qemu-aarch64-static"
CHIP = "neoverse-n1"
_CPUINFO = """\
processor : 0
Features : fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp
CPU implementer : 0x41
CPU architecture: 8
CPU part : 0xd0c
"""
"""What Linux tells of the chip, and LLVM reads."""
_DEBIAN_PACKAGES = ("python3", "libstdc++6", "zlib1g")
_PACKAGES = (
    "filelock", "gguf", "llvmlite", "msgspec", "numba", "numpy", "platformdirs", "pyyaml",
    "tokenizers", "typing-extensions",
)  # fmt: skip
"""What the forward pass and the sampler import."""


class UnavailableError(Exception):
    """What keeps the emulation from running here, in one line."""


def arm_root() -> Path:
    """Return the folder with the emulated system, fetched by the first call for these versions.

    Raises:
        UnavailableError: QEMU is not installed, or a package can't be fetched.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise UnavailableError("ARM is emulated on Linux on x86-64 only")
    for program, package in ((QEMU, "qemu-user-static"), ("apt-get", "apt"), ("dpkg", "dpkg")):
        if shutil.which(program) is None:
            raise UnavailableError(f"{program} of Debian's package {package} is not installed")
    try:
        pinned = [f"{package}=={version(package)}" for package in _PACKAGES]
    except PackageNotFoundError as error:
        raise UnavailableError(str(error)) from None
    digest = hashlib.sha256(f"{pinned} {_CPUINFO}".encode()).hexdigest()[:16]
    folder = cache_folder() / "arm64"
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / digest
    with FileLock(folder / "lock"):
        if not root.exists():
            for old in folder.glob("*/"):
                shutil.rmtree(old)
            with _new_folder(root) as new:
                _unpack_debian(new)
                _install_wheels(new, pinned)
                (new / "proc").mkdir()
                (new / "proc" / "cpuinfo").write_text(_CPUINFO)
    return root


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` when the block ends well, and else is removed."""
    temporary = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        yield temporary
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise UnavailableError(f"{command[0]} failed: {lines[0]}")


def _unpack_debian(root: Path) -> None:
    """Unpack Debian's Python and all that it depends on, with lists of packages of its own."""
    with tempfile.TemporaryDirectory(dir=root.parent) as name:
        state = Path(name)
        for part in ("lists/partial", "cache/archives/partial"):
            (state / part).mkdir(parents=True)
        (state / "status").touch()  # nothing is installed
        options = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "",
            "Debug::NoLocking": "1",
            "Dir::State": state,
            "Dir::State::lists": state / "lists",
            "Dir::State::status": state / "status",
            "Dir::Cache": state / "cache",
        }
        settings = [f"-o{name}={value}" for name, value in options.items()]
        apt = ("apt-get", "-qq", *settings)
        _run(*apt, "update")
        without = "--no-install-recommends"
        _run(*apt, "install", "--yes", "--download-only", without, *_DEBIAN_PACKAGES)
        for package in sorted((state / "cache" / "archives").glob("*.deb")):
            _run("dpkg", "-x", package, root)


def _install_wheels(root: Path, pinned: list[str]) -> None:
    (library,) = (root / "usr" / "lib").glob("python3.*/os.py")
    python = library.parent.name.removeprefix("python")
    tags = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
    code, _, errors = run_pip(
        [
            "install", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
            "--python-version", python, *(f"--platform={tag}" for tag in tags),
            "--target", str(root / "site"), *pinned,
        ]
    )  # fmt: skip
    if code != 0:
        lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or [errors]
        raise UnavailableError(f"pip failed: {lines[-1]}")


def run_on_arm(
    root: Path, program: Path, arguments: Sequence[str], *folders: Path
) -> "subprocess.CompletedProcess[str]":
    """Run a Python program on the emulated chip.

    Args:
        root: see ``arm_root``.
        program: a file.
        arguments: of the program.
        folders: from which it imports.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "PYTHON"))}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (root / "site", *folders)))
    python = (root / "usr" / "bin" / "python3").resolve()
    return subprocess.run(
        [QEMU, "-cpu", CHIP, "-L", root, python, program, *arguments],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
