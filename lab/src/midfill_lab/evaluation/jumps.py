"""Jumps of the caret: what answers are like whose prompts take KV from elsewhere.

A user opens a file and jumps through it, half of the time within 2,000 characters. Each jump goes
to a line whose rest is missing, and its prompt is the planner's, healed and trimmed as it is
served. The text that the jumps before have shown is cached with its exact KV, as after idle time in
a server. In this state the prompt is answered with each method in turn, and last exactly, which is
what the next jump finds. KV that a method has repaired is found by that method alone, so none
changes what another finds.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from midfill.errors import MidfillError, OptionError
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompt_encoder import PromptEncoder
from midfill.infill.request import InfillRequest
from midfill.methods.registry import OFF, resolve_method
from midfill.methods.resolver import check_reuse
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.system.machine import describe_machine
from midfill.system.progress import Progress
from midfill_lab.evaluation.conditions import required
from midfill_lab.evaluation.holes import draw_holes
from midfill_lab.evaluation.metrics import is_exact_first_line
from midfill_lab.evaluation.problems import Problem
from midfill_lab.evaluation.reuse_session import Measured, ReuseSession
from midfill_lab.evaluation.source_files import DEFAULT_SUFFIXES, SourceFile, read_files

DEFAULT_METHODS = " ".join(
    f"cacheblend:ratio={ratio}{order}"
    for ratio in ("0", "0.05", "0.15", "0.4")
    for order in (("",) if ratio == "0" else ("", ",order=caret"))
)
_NEAR = 2000  # characters
_DRAWN = 4  # places per jump, of which the nearer ones are taken half of the time


class JumpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked; the same options give the same prompts.

    Attributes:
        methods: specifications of what exact answers are compared with.
        limit: maximum number of jumps.
        per_file: how many of them are in one file.
        seed: all chance follows from it.
        max_tokens: of an answer; it ends with its line.
        suffixes: suffixes of the files that are read from folders.
        shortest, longest: characters of the shortest and the longest file to jump in.
    """

    methods: tuple[str, ...]
    limit: int = 1500
    per_file: int = 12
    seed: int = 0
    max_tokens: int = 64
    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    shortest: int = 12_000
    longest: int = 24_000


class JumpAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, and what it took until its first token's logits were there.

    Attributes:
        ttft_seconds: time.
        row_layers: rows times layers.
        reused_tokens: prompt tokens whose KV came from elsewhere.
        divergence: KL of the first token's distribution from the exact one, in nats.
        right: whether the first line is that of the file.
        same: whether it is that of the exact answer.
        confidence: the model's estimate that it is right; None if it has no rule for that, and in
            reports of earlier versions.
    """

    ttft_seconds: float
    row_layers: int
    reused_tokens: int
    divergence: float
    right: bool
    same: bool
    confidence: float | None = None


class Jump(msgspec.Struct, frozen=True, kw_only=True):
    """A jump, and its answers.

    Attributes:
        id, group, digest: see ``Problem``; a group is a file.
        tokens: of its prompt.
        cached: how many of them are an exact cached prefix.
        exact: the exact answer.
        answers: by method, those for which KV was taken from elsewhere. With the others the answer
            is the exact one, at its price.
    """

    id: str
    group: str
    digest: str
    tokens: int
    cached: int
    exact: JumpAnswer
    answers: dict[str, JumpAnswer]

    def answer(self, method: str) -> JumpAnswer:
        """Return what users get with a method."""
        return self.answers.get(method, self.exact)


class JumpReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a run.

    Attributes:
        model: the model and what computed its answers.
        fingerprint: digest of what decides its answers.
        machine: where it ran.
        load: other work on the machine when it began (the system's load average).
        layers: of the model.
        options: of the run.
        jumps: in order.
        format: version of this record.
    """

    model: str
    fingerprint: str
    machine: str
    load: float
    layers: int
    options: JumpOptions
    jumps: list[Jump]
    format: int = 1


@dataclass(frozen=True)
class Walk:
    """A file that a user jumps through.

    Attributes:
        group: its name.
        holes: of this file; at the first one it is opened.
    """

    group: str
    holes: Sequence[Problem]


def parse_reuse_methods(text: str) -> tuple[str, ...]:
    """Parse specifications of methods of reuse, separated by blanks.

    Raises:
        InvalidRequestError: there is no such method of reuse or option, or a value doesn't fit.
        MidfillError: none is named.
    """
    names = tuple(dict.fromkeys(text.split()))
    for name in names:
        check_reuse(name)
    if not names:
        raise OptionError("--methods names nothing to compare with exact answers")
    return names


def load_walks(paths: Sequence[Path], options: JumpOptions) -> list[Walk]:
    """Return the walks of a run.

    Args:
        paths: source files, and folders of them.
        options: of the run.

    Raises:
        MidfillError: there are no files of this length, or no places in them.
    """
    found = read_files(paths, options.suffixes)
    shortest, longest = options.shortest, options.longest
    files = [file for file in found if shortest <= len(file.text) <= longest]
    if not files:
        raise MidfillError(
            f"no file has {shortest:,} to {longest:,} characters: see --shortest and --longest"
        )
    return draw_walks(files, options)


def draw_walks(files: Sequence[SourceFile], options: JumpOptions) -> list[Walk]:
    """Draw walks through as many files as it takes, see ``load_walks``."""
    order = list(files)
    random.Random(f"{options.seed}/walks").shuffle(order)
    walks: list[Walk] = []
    left = options.limit
    for file in order:
        if left <= 0:
            break
        wanted = min(options.per_file, left) + 1
        try:
            holes = draw_holes([file], "line", _DRAWN * wanted, options.seed)
        except MidfillError:
            continue  # no line of it has code
        chance = random.Random(f"{options.seed}/jumps/{file.name}")
        walk = Walk(file.name, _in_jumps(holes, wanted, chance))
        walks.append(walk)
        left -= len(walk.holes) - 1
    if not any(len(walk.holes) > 1 for walk in walks):
        raise MidfillError("the files have no two places to jump between")
    return walks


def _in_jumps(holes: Sequence[Problem], count: int, chance: random.Random) -> list[Problem]:
    """Return so many of a file's holes in an order that goes to near ones half of the time."""
    left, walk = list(holes), [holes[0]]
    left.remove(holes[0])
    while left and len(walk) < count:
        caret = len(walk[-1].prefix)
        near = [hole for hole in left if abs(len(hole.prefix) - caret) <= _NEAR]
        hole = chance.choice(near if near and chance.random() < 0.5 else left)
        left.remove(hole)
        walk.append(hole)
    return walk


def measure_jumps(
    session: ReuseSession,
    model: str,
    walks: Sequence[Walk],
    options: JumpOptions,
    progress: Progress,
    save: Callable[[JumpReport], None],
    earlier: JumpReport | None = None,
) -> JumpReport:
    """Answer all jumps with every method and exactly.

    Args:
        session: the model.
        model: its name.
        walks: see ``load_walks``.
        options: of the run.
        progress: called with (stage, jumps so far, all jumps).
        save: called with the report so far after each file.
        earlier: the report of an interrupted run; its files are not asked again.

    Raises:
        MidfillError: the model has no FIM tokens, a method doesn't suit it, or the earlier run was
            another.
    """
    required(session.format)
    report = JumpReport(
        model=f"{model}, {session.backend}",
        fingerprint=session.fingerprint,
        machine=str(describe_machine()),
        load=os.getloadavg()[0],
        layers=session.info.layers,
        options=options,
        jumps=[],
    )
    if earlier is not None:
        report = _resumed(earlier, report, walks)
    total = sum(len(walk.holes) - 1 for walk in walks)
    known = {jump.group for jump in report.jumps}
    asker = _Asker(session, options)
    for walk in walks:
        if walk.group in known:
            continue
        found: list[Jump] = []
        for jump in asker.jumps(walk):
            found.append(jump)
            progress("jumps", len(report.jumps) + len(found), total)
        report.jumps.extend(found)
        save(report)
    return report


def _resumed(earlier: JumpReport, fresh: JumpReport, walks: Sequence[Walk]) -> JumpReport:
    """Return an interrupted run's report.

    Raises:
        MidfillError: the earlier run was another.
    """
    for what, before, now in (
        ("model", earlier.model, fresh.model),
        ("model's weights", earlier.fingerprint, fresh.fingerprint),
        ("options", earlier.options, fresh.options),
    ):
        if before != now:
            raise MidfillError(
                f"the earlier run can't be resumed: its {what} differ from this run's;"
                f" name another --json file (earlier: {before}; now: {now})"
            )
    wanted = {hole.id: hole.digest for walk in walks for hole in walk.holes}
    if any(wanted.get(jump.id) != jump.digest for jump in earlier.jumps):
        raise MidfillError("the earlier run can't be resumed: its jumps are in other files")
    return earlier


class _Asker:
    """Asks the prompts of walks with each method and exactly."""

    def __init__(self, session: ReuseSession, options: JumpOptions) -> None:
        self._session = session
        self._max_tokens = options.max_tokens
        methods = [(name, resolve_method(name)) for name in options.methods]
        # Once one finds nothing worth copying, so do those that compute more of it again.
        self._methods = sorted(
            methods, key=lambda each: each[1].ratio if isinstance(each[1], CacheBlend) else 0.0
        )

    def jumps(self, walk: Walk) -> Iterator[Jump]:
        """Yield the jumps of a walk."""
        encoder = self._session.encoder(None)
        opened, *others = walk.holes
        shown = [_prompt(encoder, opened)]
        tenant = self._session.tenant_who_asked(shown)
        for hole in others:
            prompt = _prompt(encoder, hole)
            answers, exact, tenant = self._answers(prompt, shown, tenant)
            shown.append(prompt)
            yield Jump(
                id=hole.id,
                group=hole.group,
                digest=hole.digest,
                tokens=len(prompt.token_ids),
                cached=exact.cached_tokens,
                exact=_judged(exact, exact, hole),
                answers={name: _judged(own, exact, hole) for name, own in answers.items()},
            )

    def _answers(
        self, prompt: Prompt, shown: Sequence[Prompt], tenant: str
    ) -> tuple[dict[str, Measured], Measured, str]:
        """Answer a prompt in every way.

        Args:
            prompt: the prompt.
            shown: the prompts before it.
            tenant: who has asked these.

        Returns:
            The answers with KV from elsewhere by method, the exact one, and the tenant who has
            asked this one, too.
        """
        found: dict[str, Measured] = {}
        without: list[object] = []
        exact: Measured | None = None
        for name, method in self._methods:
            if any(_copies_no_more(method, other) for other in without):
                continue
            if exact is not None:  # and cached
                tenant = self._session.tenant_who_asked(shown)
                exact = None
            measured = self._session.ask(prompt, name, tenant, self._max_tokens)
            if measured.reused_tokens:
                found[name] = measured
            else:
                without.append(method)
                exact = measured
        if exact is None:
            exact = self._session.ask(prompt, OFF, tenant, self._max_tokens)
        return found, exact, tenant


def _copies_no_more(method: object, other: object) -> bool:
    """Return whether a method takes nothing from elsewhere where another one doesn't."""
    if not isinstance(method, CacheBlend) or not isinstance(other, CacheBlend):
        return False
    same = (method.min_run, method.check_layer) == (other.min_run, other.check_layer)
    return same and method.ratio >= other.ratio


def _prompt(encoder: PromptEncoder, hole: Problem) -> Prompt:
    request = InfillRequest(prefix=hole.prefix, suffix=hole.suffix, document=hole.group)
    return encoder.infill(request)


def _judged(own: Measured, exact: Measured, hole: Problem) -> JumpAnswer:
    p, q = exact.log_probabilities, own.log_probabilities
    return JumpAnswer(
        ttft_seconds=own.ttft_seconds,
        row_layers=own.row_layers,
        reused_tokens=own.reused_tokens,
        divergence=max(float((np.exp(p) * (p - q)).sum()), 0.0),
        right=is_exact_first_line(own.answer, hole.hole),
        same=own.answer == exact.answer,
        confidence=own.confidence,
    )
