"""Two versions of midfill, each as a copy of its source: a commit and the tree that is running.

Copies are not registered with the repository, and the tree can be edited while they are measured.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

import midfill
from midfill.errors import MidfillError

_ERROR_LINES = 8


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is measured.

    Attributes:
        commit: its hash; of this tree, the one that is checked out.
        modified: whether files differ from the commit.
    """

    commit: str
    modified: bool = False

    def __str__(self) -> str:
        return f"{self.commit[:10]}{' with changes' if self.modified else ''}"


@dataclass(frozen=True)
class VersionCopy:
    """A version's source, copied to a folder of its own.

    Attributes:
        side: "old" or "new".
        version: what was copied.
        source: the folder that holds the package.
    """

    side: str
    version: Version
    source: Path

    @property
    def name(self) -> str:
        """What progress and errors call it."""
        return f"{self.side} ({self.version})"

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that let Python import this version."""
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(self.source), *([before] if before else [])])
        return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs this interpreter; it takes ``environment``."""
        return [sys.executable, "-P", *arguments]  # -P: the current folder holds no modules

    def run(self, arguments: Sequence[str]) -> str:
        """Run this interpreter with the version and return what it printed.

        Raises:
            MidfillError: it ended with an error.
        """
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise MidfillError(
                f"{self.name} failed with {done.returncode}: {last_lines(done.stdout)}"
            )
        return done.stdout


@dataclass(frozen=True)
class Copies:
    """Both versions.

    Attributes:
        folder: for files of the comparison; removed at its end.
    """

    old: VersionCopy
    new: VersionCopy
    folder: Path

    def in_turn(self, turn: int) -> tuple[VersionCopy, VersionCopy]:
        """Return both in the order of one turn: old, new, then new, old, and so on."""
        return (self.old, self.new) if turn % 2 == 0 else (self.new, self.old)


@contextmanager
def version_copies(commit: str, package: Path | None = None) -> Iterator[Copies]:
    """Copies of a commit and of the tree, each checked to be what Python imports.

    Args:
        commit: anything that git resolves to a commit.
        package: the package's folder in a git checkout; None takes the running one.

    Raises:
        MidfillError: no git checkout, no such commit, or Python imports something else.
    """
    package = (package or Path(midfill.__file__).parent).resolve()
    repository = _Repository.find(package)
    old = Version(commit=repository.resolve(commit))
    new = Version(commit=repository.resolve("HEAD"), modified=repository.is_modified())
    with tempfile.TemporaryDirectory(prefix="midfill-versions-") as name:
        folder = Path(name).resolve()
        repository.extract(old.commit, folder / "old")
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(package.parent, folder / "new" / repository.source, ignore=ignored)
        copies = Copies(
            VersionCopy("old", old, folder / "old" / repository.source),
            VersionCopy("new", new, folder / "new" / repository.source),
            folder,
        )
        for copy in copies.in_turn(0):
            found = copy.run(["-c", "import midfill; print(midfill.__file__)"]).strip()
            if copy.source not in Path(found).parents:
                raise MidfillError(f"{copy.name} can't be measured: Python imports {found} instead")
        yield copies


def last_lines(text: str) -> str:
    """Return a program's last words."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_ERROR_LINES:]) or "it said nothing"


@dataclass(frozen=True)
class _Repository:
    """The git checkout that holds a package.

    Attributes:
        root: of the work tree.
        source: the folder with the package in it, relative to ``root``.
    """

    root: Path
    source: Path

    @classmethod
    def find(cls, package: Path) -> "_Repository":
        """Return the checkout of a package's folder.

        Raises:
            MidfillError: the folder is not part of one.
        """
        explained = (
            f"two versions are compared from a git checkout, but midfill runs from {package} "
            "(install it with pip install -e, or name a checkout's src folder in PYTHONPATH)"
        )
        inside = _git(package, "ls-files", "--error-unmatch", "__init__.py", error=explained)
        assert inside
        root = _git(package, "rev-parse", "--show-toplevel", error=explained).decode().strip()
        return cls(Path(root), package.parent.relative_to(Path(root).resolve()))

    def resolve(self, commit: str) -> str:
        """Return a commit's hash.

        Raises:
            MidfillError: there is no such commit.
        """
        named = f"{commit}^{{commit}}"
        unknown = f"{self.root} has no commit {commit!r}"
        found = _git(self.root, "rev-parse", "--verify", "--end-of-options", named, error=unknown)
        return found.decode().split()[-1]

    def is_modified(self) -> bool:
        """Whether source files differ from the commit that is checked out."""
        listed = _git(self.root, "status", "--porcelain", "--", str(self.source))
        return bool(listed.strip())

    def extract(self, commit: str, folder: Path) -> None:
        """Write a commit's source into a folder.

        Raises:
            MidfillError: the commit has no such source.
        """
        missing = f"commit {commit[:10]} has no folder {self.source}"
        packed = _git(
            self.root, "archive", "--format=tar", commit, "--", str(self.source), error=missing
        )
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")


def _git(folder: Path, *arguments: str, error: str = "git failed") -> bytes:
    """Run git in a folder and return what it printed.

    Raises:
        MidfillError: ``error`` and git's own last line.
    """
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise MidfillError("git is not installed") from None
    except subprocess.CalledProcessError as failed:
        reason = failed.stderr.decode("utf-8", "replace").strip().splitlines()
        raise MidfillError(f"{error}{f' (git: {reason[-1]})' if reason else ''}") from None
