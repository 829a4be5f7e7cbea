"""``bench rounds`` of two versions in interleaved pairs of runs, a process each.

A machine's speed drifts over minutes, so the runs alternate: old, new, new, old, and so on. What
is compared are the two runs of a pair, which lie seconds apart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare.copies import Copies, VersionCopy, last_lines, version_copies
from benchmarks.compare.ratios import RatioFigure, VersionsReport, check_pairs, ratio_figure
from midfill.errors import MidfillError
from midfill.system.machine import describe_machine
from midfill.system.process import ended_by_sigterm


class Reading(NamedTuple):
    """One figure of one run.

    Attributes:
        value: in ``unit``.
        unit: "requests/s" is a rate, "ms" a time.
    """

    value: float
    unit: str


def compare_rounds(
    arguments: Sequence[str],
    commit: str,
    *,
    pairs: int,
    package: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> VersionsReport:
    """Run ``bench rounds`` of the running tree and of a commit of its repository in pairs.

    Each version is run once before the first pair: that compiles its kernels and packs weights.

    Args:
        arguments: of the command, without ``--json``; the commit must know them too.
        commit: anything that git resolves to a commit.
        pairs: how many; at least ``MIN_PAIRS``.
        package: the package's folder in a git checkout; None takes the running one.
        progress: receives what is being done.

    Raises:
        ValueError: fewer pairs than ``MIN_PAIRS``.
        MidfillError: no git checkout, no such commit, or a version that fails.
    """
    check_pairs(pairs)
    with ended_by_sigterm(), version_copies(commit, package) as copies:
        old, new = _run_pairs(copies, arguments, pairs, progress)
        return VersionsReport(
            benchmark="rounds",
            arguments=list(arguments),
            machine=describe_machine(),
            old=copies.old.version,
            new=copies.new.version,
            pairs=pairs,
            figures=_figures(old, new),
        )


Runs = list[Mapping[str, Reading]]


def _run_pairs(
    copies: Copies, arguments: Sequence[str], pairs: int, progress: Callable[[str], None]
) -> tuple[Runs, Runs]:
    """Return the figures of the old version's runs and of the new one's."""
    runs: dict[str, Runs] = {"old": [], "new": []}
    for copy in copies.in_turn(0):
        progress(f"{copy.name}: warming up")
        _run(copy, copies.folder, arguments)
    for pair in range(pairs):
        for copy in copies.in_turn(pair):
            progress(f"pair {pair + 1} of {pairs}: {copy.name}")
            runs[copy.side].append(_run(copy, copies.folder, arguments))
    return runs["old"], runs["new"]


def _run(copy: VersionCopy, folder: Path, arguments: Sequence[str]) -> dict[str, Reading]:
    """Run the benchmark once.

    Raises:
        MidfillError: it failed, or wrote something else than its figures.
    """
    figures = folder / "figures.json"
    figures.unlink(missing_ok=True)
    said = copy.run(["-m", "midfill", "bench", "rounds", *arguments, "--json", str(figures)])
    try:
        return _read(json.loads(figures.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MidfillError(f"{copy.name} left no figures ({error!r}): {last_lines(said)}") from None


def _read(report: Any) -> dict[str, Reading]:
    """Figures of ``midfill bench rounds --json``."""
    readings = {}
    for layout, result in report["layouts"].items():
        readings[layout] = Reading(result["requests_per_second"], "requests/s")
        for which in ("first", "later"):
            if seconds := result[f"{which}_ttft_seconds"]:
                readings[f"{layout}, {which} TTFT"] = Reading(1000 * seconds, "ms")
    return readings


def _figures(old: Runs, new: Runs) -> list[RatioFigure]:
    """Every figure that all runs of both versions have."""
    figures = []
    for name, (_, unit) in new[0].items():
        if not all(name in run for run in (*old, *new)):
            continue
        before, after = ([run[name].value for run in runs] for runs in (old, new))
        ratios = [
            was / now if unit == "ms" else now / was for was, now in zip(before, after, strict=True)
        ]
        figures.append(ratio_figure(name, unit, before, after, ratios))
    if not figures:
        raise MidfillError("the two versions measured nothing in common")
    return figures
