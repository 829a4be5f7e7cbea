"""Files that the last request has shown: how much of them is computed again, and what is lost.

They are shown again in the same order, in another one, beside a file that is new, and after a line
was put into one of them, each before another document. Prompts are the planner's, which shows first
what is cached.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from benchmarks.report import difference_cell
from midfill.errors import OptionError
from midfill.frontend.prompt import Prompt
from midfill.infill.context_files import ContextFile
from midfill_lab.evaluation.summary import estimate_share

Files = list[ContextFile]


class FileTokens(NamedTuple):
    """Tokens of files that the prompts before have shown, changed ones included.

    Attributes:
        shown: of a prompt, all of them.
        new: those behind the prompt's cached prefix.
    """

    shown: int
    new: int


class ShownAnswer(NamedTuple):
    """An answer to a prompt that shows known files.

    Attributes:
        name: of the hole.
        files: its tokens of known files.
        again: how many of these were computed again.
        row_layers: rows times layers until the first token.
        divergence: KL of the first token's distribution from the exact one, in nats.
        right: whether the first line is the text that was there.
        same: whether it is that of the exact answer.
    """

    name: str
    files: int
    again: int
    row_layers: int
    divergence: float
    right: bool
    same: bool


def _same(files: Files, other: ContextFile, chance: random.Random) -> Files:
    return files


def _reversed(files: Files, other: ContextFile, chance: random.Random) -> Files:
    return files[::-1]


def _beside(files: Files, other: ContextFile, chance: random.Random) -> Files:
    return [other, *files]


def _edited(files: Files, other: ContextFile, chance: random.Random) -> Files:
    number = chance.randrange(len(files))
    lines = files[number].text.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines)), f"value_{number} = compute({number})\n")
    changed = ContextFile(text="".join(lines), path=files[number].path)
    return [*files[:number], changed, *files[number + 1 :]]


CHANGES: Mapping[str, Callable[[Files, ContextFile, random.Random], Files]] = {
    "files again": _same,
    "files reordered": _reversed,
    "files beside": _beside,
    "files edited": _edited,
}
"""By kind of prompt: returns the files to show after some, given one more."""


def parse_ways(text: str) -> tuple[str, ...]:
    """Parse ways to show known files, such as "reordered,edited", to kinds of prompts.

    Raises:
        MidfillError: there is no such way.
    """
    kinds = tuple(f"files {way.strip()}" for way in text.split(","))
    for kind in kinds:
        if kind not in CHANGES:
            known = ", ".join(each.removeprefix("files ") for each in CHANGES)
            raise OptionError(f"--ways takes {known}, not {kind.removeprefix('files ')!r}")
    return kinds


_SPAN = 8


def count_known(before: Prompt, prompt: Prompt, cached: int) -> FileTokens:
    """Return a prompt's tokens of files that the one before it has shown, but for some of them.

    A file is known if most of its spans of ``_SPAN`` tokens are: tokens at its ends may depend on
    what stands beside it.

    Args:
        before: the prompt before.
        prompt: the prompt.
        cached: tokens of its exact cached prefix.
    """
    known = set(_spans(before.token_ids))
    shown = new = 0
    for start, end in pairwise(prompt.contexts):
        spans = _spans(prompt.token_ids[start:end])
        if sum(span in known for span in spans) > len(spans) / 2:
            shown += end - start
            new += max(0, end - max(start, cached))
    return FileTokens(shown, new)


def _spans(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + _SPAN]) for at in range(len(tokens) - _SPAN + 1)]


def shown_row(
    kind: str, method: str, found: Sequence[ShownAnswer], exact: Sequence[ShownAnswer]
) -> dict[str, str]:
    """Return the row of a kind of prompt under a method; the answers are of the same holes."""
    groups = [answer.name for answer in found]
    same = estimate_share([answer.same for answer in found], groups)
    of_exact, right = ([float(answer.right) for answer in answers] for answers in (exact, found))
    again = sum(answer.again for answer in found) / sum(answer.files for answer in found)
    work = sum(answer.row_layers for answer in found) / sum(answer.row_layers for answer in exact)
    is_exact = found == exact
    return {
        "prompts": f"{kind} ({len(found)})",
        "method": method,
        "file tokens": f"{sum(answer.files for answer in found) / len(found):,.0f}",
        "computed again": f"{again:.1%}",
        "rows x layers": f"{work:.2f}",
        "KL": f"{sum(answer.divergence for answer in found) / len(found):.4f}",
        "first line as exact": f"{same.value:.0%} [{same.low:.0%}, {same.high:.0%}]",
        "right": f"{sum(right) / len(found):.0%}",
        "minus exact, points": ""
        if is_exact
        else difference_cell(of_exact, right, groups, digits=1, scale=100),
    }
