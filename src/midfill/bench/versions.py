"""Two versions of midfill compared: this tree and a commit, measured in interleaved pairs.

Both run as programs of their own, with the same interpreter and libraries, from copies of their
source that are made at the start; each run is one short ``midfill bench`` whose figures are read
from its JSON. A machine's speed drifts over minutes, so the runs alternate: old, new, new, old,
and so on. What is compared are the two runs of a pair, which lie seconds apart.

The ratio of a figure is the median over pairs. Its 95% interval is the sign test's: two of the
pairs' own ratios, counted in from both ends, such that the true median lies between them with a
probability of at least 95% whatever the ratios' distribution. (A bootstrap of medians, tried on
6 to 24 simulated pairs, held the true median in 93% of the cases.)
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec

import midfill
from midfill.bench.peers.process import ended_by_sigterm
from midfill.errors import MidfillError
from midfill.reporting.result_table import ResultTable
from midfill.system.machine import Machine, describe_machine

Benchmark = Literal["speed", "rounds"]

MIN_PAIRS = 6
"""Five pairs lie all on one side of the median in 2 of 32 cases, six in 2 of 64: under 5%."""

_TAIL = 0.025
"""Largest probability that the true median lies beyond one end of the interval."""
_ERROR_LINES = 8


class Reading(NamedTuple):
    """One figure of one run.

    Attributes:
        value: in ``unit``.
        unit: "tokens/s" and "requests/s" are rates, "ms" is a time.
    """

    value: float
    unit: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was measured.

    Attributes:
        commit: its hash; of this tree, the one that is checked out.
        modified: whether files differ from the commit.
    """

    commit: str
    modified: bool = False

    def __str__(self) -> str:
        return f"{self.commit[:10]}{' with changes' if self.modified else ''}"


class RatioFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of both versions.

    Attributes:
        name: such as "decode at 16 tokens".
        unit: of ``old`` and ``new``.
        old, new: the figure of every pair, in order.
        ratio: how many times as fast the new version is, the median over pairs: new / old of a
            rate, old / new of a time.
        low, high: 95% interval of ``ratio``.
    """

    name: str
    unit: str
    old: list[float]
    new: list[float]
    ratio: float
    low: float
    high: float


class VersionsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one comparison measured.

    Attributes:
        benchmark: "speed" or "rounds".
        arguments: of the benchmark, for both versions.
        pairs: how many.
    """

    benchmark: Benchmark
    arguments: list[str]
    machine: Machine
    old: Version
    new: Version
    pairs: int
    figures: list[RatioFigure]


@dataclass(frozen=True)
class _Copy:
    """A version's source, copied to a folder of its own.

    Attributes:
        name: for progress and errors.
        source: the folder that holds the package.
    """

    name: str
    source: Path


def compare_versions(
    benchmark: Benchmark,
    arguments: Sequence[str],
    commit: str,
    *,
    pairs: int,
    package: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> VersionsReport:
    """Measure the running tree and a commit of its repository in pairs.

    Each version is run once before the first pair: that compiles its kernels and packs weights.

    Args:
        benchmark: which ``midfill bench`` command.
        arguments: of that command, without ``--json``; the commit must know them too.
        commit: anything that git resolves to a commit.
        pairs: how many; at least ``MIN_PAIRS``.
        package: the package's folder in a git checkout; None takes the running one.
        progress: receives what is being done.

    Raises:
        ValueError: fewer pairs than ``MIN_PAIRS``.
        MidfillError: no git checkout, no such commit, or a version that fails.
    """
    if pairs < MIN_PAIRS:
        raise ValueError(f"{pairs} pairs give no 95% interval, {MIN_PAIRS} do")
    package = (package or Path(midfill.__file__).parent).resolve()
    repository = _Repository.find(package)
    old = Version(commit=repository.resolve(commit))
    new = Version(commit=repository.resolve("HEAD"), modified=repository.is_modified())
    runs: dict[str, list[Mapping[str, Reading]]] = {"old": [], "new": []}
    with _copies(repository, package, old, new) as copies, ended_by_sigterm():
        for copy in copies.values():
            progress(f"{copy.name}: warming up")
            _run(copy, benchmark, arguments)
        for pair in range(pairs):
            for side in ("old", "new") if pair % 2 == 0 else ("new", "old"):
                progress(f"pair {pair + 1} of {pairs}: {copies[side].name}")
                runs[side].append(_run(copies[side], benchmark, arguments))
    return VersionsReport(
        benchmark=benchmark,
        arguments=list(arguments),
        machine=describe_machine(),
        old=old,
        new=new,
        pairs=pairs,
        figures=_ratios(runs["old"], runs["new"]),
    )


def versions_table(report: VersionsReport) -> ResultTable:
    """A row per figure."""
    return ResultTable(
        title=f"bench {report.benchmark}: this tree and {report.old}",
        rows=[
            {
                "figure": one.name,
                "unit": one.unit,
                "old": f"{median(one.old):.4g}",
                "new": f"{median(one.new):.4g}",
                "times as fast": f"{one.ratio:.3f}",
                "95% interval": f"{one.low:.3f} to {one.high:.3f}",
            }
            for one in report.figures
        ],
        labels=2,
        caption=f"Old: {report.old}; new: {report.new}. midfill bench {report.benchmark} "
        f"{' '.join(report.arguments)}; {report.pairs} interleaved pairs of runs. Times as fast: "
        "median over pairs, above 1 the new version is faster; its interval is the sign test's. "
        f"{report.machine}.",
    )


def estimate_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the pairs' ratios and the ends of its 95% interval.

    Args:
        ratios: at least ``MIN_PAIRS``.
    """
    ordered = sorted(ratios)
    count = len(ordered)
    place, below = 0, 2.0**-count  # of the lower end; that the median lies below it
    while (more := below + comb(count, place + 1) * 2.0**-count) <= _TAIL:
        place, below = place + 1, more
    return median(ordered), ordered[place], ordered[count - 1 - place]


def _ratios(
    old: Sequence[Mapping[str, Reading]], new: Sequence[Mapping[str, Reading]]
) -> list[RatioFigure]:
    """Every figure that all runs of both versions have."""
    figures = []
    for name, (_, unit) in new[0].items():
        if not all(name in run for run in (*old, *new)):
            continue
        before, after = ([run[name].value for run in runs] for runs in (old, new))
        pairs = zip(before, after, strict=True)
        ratio, low, high = estimate_ratio(
            [was / now if unit == "ms" else now / was for was, now in pairs]
        )
        figures.append(
            RatioFigure(
                name=name, unit=unit, old=before, new=after, ratio=ratio, low=low, high=high
            )
        )
    if not figures:
        raise MidfillError("the two versions measured nothing in common")
    return figures


def _run(copy: _Copy, benchmark: Benchmark, arguments: Sequence[str]) -> dict[str, Reading]:
    """Run the benchmark once.

    Raises:
        MidfillError: it failed, or wrote something else than its figures.
    """
    figures = copy.source.parent / "figures.json"
    figures.unlink(missing_ok=True)
    said = _run_python(
        copy, ["-m", "midfill", "bench", benchmark, *arguments, "--json", str(figures)]
    )
    try:
        read = _read_speed if benchmark == "speed" else _read_rounds
        return read(json.loads(figures.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MidfillError(
            f"{copy.name} left no figures ({error!r}): {_last_lines(said)}"
        ) from None


def _run_python(copy: _Copy, arguments: Sequence[str]) -> str:
    """Run this interpreter on a version and return what it printed.

    Raises:
        MidfillError: it ended with an error.
    """
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(copy.source), *([before] if before else [])])
    # -P: the folder this runs in is not searched for modules.
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise MidfillError(f"{copy.name} failed with {done.returncode}: {_last_lines(done.stdout)}")
    return done.stdout


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_ERROR_LINES:]) or "it said nothing"


def _read_speed(report: Any) -> dict[str, Reading]:
    """Figures of ``midfill bench speed --json``."""
    return {
        f"{kind} {preposition} {length} tokens": Reading(rate["tokens_per_second"], "tokens/s")
        for kind, preposition in (("prefill", "of"), ("decode", "at"))
        for length, rate in report[kind].items()
    }


def _read_rounds(report: Any) -> dict[str, Reading]:
    """Figures of ``midfill bench rounds --json``."""
    readings = {}
    for layout, result in report["layouts"].items():
        readings[layout] = Reading(result["requests_per_second"], "requests/s")
        for which in ("first", "later"):
            if seconds := result[f"{which}_ttft_seconds"]:
                readings[f"{layout}, {which} TTFT"] = Reading(1000 * seconds, "ms")
    return readings


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
            f"--compare needs midfill to run from a git checkout; it runs from {package} (install "
            "it with pip install -e, or name a checkout's src folder in PYTHONPATH)"
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


@contextmanager
def _copies(
    repository: _Repository, package: Path, old: Version, new: Version
) -> Iterator[dict[str, _Copy]]:
    """Copies of both versions' source, each checked to be what Python imports; removed at the end.

    Neither is registered with the repository, and this tree can be edited meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="midfill-versions-") as name:
        folder = Path(name).resolve()
        repository.extract(old.commit, folder / "old")
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        target = folder / "new" / repository.source
        shutil.copytree(package.parent, target, ignore=ignored)
        copies = {
            "old": _Copy(f"old ({old})", folder / "old" / repository.source),
            "new": _Copy(f"new ({new})", target),
        }
        for copy in copies.values():
            found = _run_python(copy, ["-c", "import midfill; print(midfill.__file__)"]).strip()
            if copy.source not in Path(found).parents:
                raise MidfillError(f"{copy.name} can't be measured: Python imports {found} instead")
        yield copies


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
