"""Source files of published packages, fetched by name and exact version.

Python packages are fetched with pip. A wheel is preferred: nothing of it is run. Of a package
without one, pip downloads the source distribution, and runs the package's build script to read its
metadata. ``npm:NAME==VERSION`` is a package of the npm registry, ``debian:NAME==VERSION`` a binary
package of the Debian release that the machine runs; nothing of either is run.

Each package gets a folder of its own, named ``NAME-VERSION``, that appears complete or not at all.
So an interrupted download of many packages continues where it stopped. The folder holds the files
with the wanted suffixes, the package's metadata and licence files, and a record of its origin.
"""

import hashlib
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

import msgspec

from midfill.errors import MidfillError
from midfill.system.files import write_folder
from midfill.system.pip import run_pip, summarise_failure
from midfill.system.progress import Progress, ignore_progress
from midfill_lab.training.corpus import PACKAGE_RECORD

Registry = Literal["pypi", "npm", "debian"]

_REQUIREMENT = re.compile(
    r"(?:(?P<registry>npm|debian):)?"
    r"(?P<name>(?:@[a-z0-9._-]+/)?[A-Za-z0-9](?:[A-Za-z0-9.+_-]*[A-Za-z0-9])?)"
    r"\s*==\s*(?P<version>[A-Za-z0-9.!+:~_-]+)"
    r"(?:\s+--hash=sha256:(?P<sha256>[0-9a-f]{64}))?"
)
_METADATA_NAMES = frozenset({"METADATA", "RECORD", "PKG-INFO", "package.json"})
_DEBIAN_LICENCE = re.compile(r"usr/share/doc/[^/]+/copyright")
_MADE_SUFFIXES = (".d.ts", ".min.js")  # written by compilers, of sources that are there as well
_LICENCE_NAME = re.compile(r"(licen[sc]e|copying|notice|authors)", re.IGNORECASE)
_MAX_FILE_BYTES = 4 << 20  # larger ones are data or generated
_MAX_PACKAGE_BYTES = 512 << 20


@dataclass(frozen=True, order=True)
class Package:
    """One version of a package.

    Attributes:
        name: as the package index knows it.
        version: the exact version.
        sha256: hex digest of the archive that is downloaded; None accepts any.
        registry: where it is published.
        suffixes: suffixes of its wanted files; empty for all that the caller wants.
    """

    name: str
    version: str
    sha256: str | None = None
    registry: Registry = "pypi"
    suffixes: tuple[str, ...] = ()

    @property
    def folder_name(self) -> str:
        """Name of the folder that holds its files."""
        name = re.sub("[-_./@]+", "-", self.name).lower().strip("-")
        place = "" if self.registry == "pypi" else f"{self.registry}-"
        return f"{place}{name}-{self.version.replace(':', '-')}"

    def __str__(self) -> str:
        place = "" if self.registry == "pypi" else f"{self.registry}:"
        return f"{place}{self.name}=={self.version}"


class PackageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a package's files.

    Attributes:
        requirement: name and version.
        archive: name of the downloaded file.
        sha256: its digest.
        suffixes: suffixes of the files that were extracted.
        files: number of these.
    """

    requirement: str
    archive: str
    sha256: str
    suffixes: tuple[str, ...]
    files: int


def parse_requirement(text: str) -> Package:
    """Parse ``name==version``, with ``--hash=sha256:...`` after it as pip writes it.

    ``npm:`` or ``debian:`` before the name chooses another registry than PyPI.

    Raises:
        MidfillError: it is something else.
    """
    match = _REQUIREMENT.fullmatch(text.strip())
    if match is None:
        raise MidfillError(
            f"{text.strip()!r} names no exact version: write name==version, optionally followed by"
            " --hash=sha256:DIGEST"
        )
    registries: dict[str | None, Registry] = {"npm": "npm", "debian": "debian"}
    registry = registries.get(match["registry"], "pypi")
    return Package(match["name"], match["version"], match["sha256"], registry)


def read_requirements(path: Path) -> list[Package]:
    """Read a list of packages in pip's requirements format; every version must be exact.

    Raises:
        MidfillError: the file can't be read, is empty, or a line is not understood.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MidfillError(f"{path}: can't be read: {error}") from None
    packages = []
    for line in text.replace("\\\n", " ").splitlines():
        requirement = re.sub(r"(^|\s)#.*", "", line).strip()
        if requirement:
            try:
                packages.append(parse_requirement(requirement))
            except MidfillError as error:
                raise MidfillError(f"{path}: {error}") from None
    if not packages:
        raise MidfillError(f"{path}: names no package")
    return packages


def fetch_packages(
    packages: Sequence[Package],
    folder: Path,
    suffixes: Sequence[str],
    progress: Progress = ignore_progress,
) -> list[Path]:
    """Fetch packages one after the other, see ``fetch_package``; return their folders.

    Args:
        packages: what to fetch.
        folder: where each package gets its folder; those already there are kept.
        suffixes: suffixes of the wanted files, such as ".py", of packages that don't name theirs.
        progress: called with ("fetching NAME==VERSION", packages so far, all packages).

    Raises:
        MidfillError: a package can't be fetched.
    """
    folders = []
    for done, package in enumerate(packages):
        progress(f"fetching {package}", done, len(packages))
        folders.append(fetch_package(package, folder, package.suffixes or suffixes))
    progress("fetched packages", len(packages), len(packages))
    return folders


def fetch_package(package: Package, folder: Path, suffixes: Sequence[str]) -> Path:
    """Fetch a package's files unless they are there.

    Args:
        package: what to fetch.
        folder: the package's own folder is made in it; one process at a time may work there.
        suffixes: suffixes of the wanted files, such as ".py".

    Returns:
        The package's own folder.

    Raises:
        MidfillError: it can't be found or downloaded, its digest is another, or it can't be
            unpacked.
    """
    target = folder / package.folder_name
    if _is_complete(target, package, suffixes):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        archive = _download(package, Path(temporary))
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if package.sha256 not in (None, digest):
            raise MidfillError(
                f"{package}: {archive.name} is not the expected file: its sha256 is {digest}"
            )

        def write(place: Path) -> None:
            files = _extract(archive, place, frozenset(suffixes))
            record = PackageRecord(
                requirement=str(package),
                archive=archive.name,
                sha256=digest,
                suffixes=tuple(suffixes),
                files=files,
            )
            (place / PACKAGE_RECORD).write_bytes(msgspec.json.encode(record))

        try:
            write_folder(target, write)
        except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
            raise MidfillError(f"{package}: {archive.name} is broken: {error}") from None
    return target


def read_record(folder: Path) -> PackageRecord | None:
    """Return the record in a package's folder, None if there is none."""
    try:
        return msgspec.json.decode((folder / PACKAGE_RECORD).read_bytes(), type=PackageRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _is_complete(target: Path, package: Package, suffixes: Sequence[str]) -> bool:
    record = read_record(target)
    return (
        record is not None
        and record.requirement == str(package)
        and package.sha256 in (None, record.sha256)
        and set(suffixes) <= set(record.suffixes)
    )


def _download(package: Package, folder: Path) -> Path:
    """Download a package's archive into an empty folder; return its path."""
    if package.registry == "pypi":
        return _download_with_pip(package, folder)
    name, version = package.name, package.version
    command = ["npm", "pack", "--silent", "--ignore-scripts", f"{name}@{version}"]
    if package.registry == "debian":
        command = ["apt-get", "download", "--quiet", f"{name}={version}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    except OSError:
        raise MidfillError(f"fetching {package} needs {command[0]}") from None
    archives = [path for path in folder.iterdir() if path.is_file()]
    if done.returncode or len(archives) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = (lines or ["it gave no reason"])[-1]
        raise MidfillError(f"{command[0]} can't fetch {package}: {reason}")
    return archives[0]


def _download_with_pip(package: Package, folder: Path) -> Path:
    """Let pip download a wheel, else a source distribution, into an empty folder."""
    complaint = ""
    for choice in (["--only-binary", ":all:"], ["--no-binary", ":all:"]):
        arguments = ["download", "--quiet", "--no-deps", "--dest", str(folder), *choice]
        code, _, errors = run_pip([*arguments, str(package)])
        archives = [path for path in folder.iterdir() if path.is_file()]
        if code == 0 and len(archives) == 1:
            return archives[0]
        complaint = errors
    raise MidfillError(
        f"pip can't fetch {package} (is the package index reachable?): "
        f"{summarise_failure(complaint)}"
    )


def _extract(archive: Path, place: Path, suffixes: frozenset[str]) -> int:
    """Unpack the wanted files and the package's metadata; return the number of wanted files."""
    count = total = 0
    with _members(archive) as members:
        for name, size, content in members:
            path = _safe_path(name, strip_root=archive.suffix not in (".whl", ".zip", ".deb"))
            if path is None or size > _MAX_FILE_BYTES:
                continue
            if archive.suffix == ".deb" and _DEBIAN_LICENCE.fullmatch(path.as_posix()):
                path = PurePosixPath("LICENSE")  # where a file's licence is looked for
            wanted = path.suffix in suffixes and not path.name.endswith(_MADE_SUFFIXES)
            if not wanted and not _is_metadata(path):
                continue
            total += size
            if total > _MAX_PACKAGE_BYTES:
                raise MidfillError(
                    f"{archive.name} unpacks to more than {_MAX_PACKAGE_BYTES} bytes"
                )
            target = place / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read(_MAX_FILE_BYTES))
            count += wanted
    return count


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[tuple[str, int, IO[bytes]]]]:
    """Open an archive; yield the name, size and content of each regular file in it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield (
                (member.filename, member.file_size, opened.open(member))
                for member in opened.infolist()
                if not member.is_dir()
            )
    elif archive.suffix == ".deb":
        with (
            subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
            ) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as streamed,
        ):
            yield _tar_members(streamed)
    else:
        with tarfile.open(archive) as opened_tar:
            yield _tar_members(opened_tar)


def _tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    for member in archive:
        if member.isreg() and (content := archive.extractfile(member)) is not None:
            yield member.name, member.size, content


def _safe_path(name: str, *, strip_root: bool) -> PurePosixPath | None:
    """Return a member's relative path; None if it would leave the folder."""
    path = PurePosixPath(name)
    parts = path.parts[1:] if strip_root else path.parts
    if path.is_absolute() or not parts or any(part in ("..", "") or "\0" in part for part in parts):
        return None
    return PurePosixPath(*parts)


def _is_metadata(path: PurePosixPath) -> bool:
    """Return whether a file says under which licence the package is."""
    if path.name in _METADATA_NAMES:
        return True
    return _LICENCE_NAME.match(path.name) is not None and path.suffix.lower() != ".py"
