"""The loads that servers are compared on, each measured from outside over HTTP.

    prefill    random tokens, one token out: prompt tokens a second until the first token
    decode     streams that go on from real code, greedily: tokens a second of all of them together
               while all of them decode; prompts are in the cache before
    keystroke  ten characters typed into a document, nine tokens asked: time to the first, and of
               the eight after it
    rounds     EFIM's load, see ``midfill.bench.rounds``
    session    an editing session, see ``midfill.bench.edits.replay``

A peer gets the last three with prompts laid out by the client: "fim" or "psm", PRE prefix SUF
suffix MID as most clients send it, and "efim", PRE head SUF suffix MID rest, the cheapest that a
client can do. midfill gets them too, and "native", prefix and suffix as they are.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midfill.bench.clients import HttpClient, Measurement
from midfill.bench.documents import standard_library_documents
from midfill.bench.edits.replay import replay_edits
from midfill.bench.peers.compared_model import Prompts
from midfill.bench.peers.results import TOKENS_PER_SECOND, Figure, PeersOptions, figure
from midfill.bench.rounds import LAYOUTS, Layout, RoundsOptions, measure_rounds
from midfill.errors import MidfillError

LOADS = ("prefill", "decode", "keystroke", "rounds", "session")
SPECULATIVE = "decode-speculating"
"""The decode load with one stream, on a server that guesses; see ``loads_for``."""

LAID_OUT = ("fim", "efim", "psm")
"""Layouts that a client makes of a model's FIM tokens, for any server."""
ALL_LAYOUTS = (*LAID_OUT, "native")

CHARACTERS = 10
FURTHER = 8
_SESSION_FILES = 6
_SLACK = 64
_WARM_UP = (256, 16)
MIN_SEQUENCE = sum(_WARM_UP)
"""Tokens that the longest sequence of a server must have room for, whatever the loads."""
_TEXT = "def add(a, b):\n    return a + b  # caf\u00e9\n\n\nprint(add(1, 22))\n"


@dataclass(frozen=True)
class Subject:
    """A running server.

    Attributes:
        bound: (tokens of context, streams) -> tokens/s that memory's bandwidth allows.
        progress: is told what is measured.
    """

    client: HttpClient
    model: str
    bound: Callable[[float, int], float]
    progress: Callable[[str], None]

    async def ask(self, **fields: Any) -> Measurement:
        """A greedy completion that doesn't stop early."""
        body = {"model": self.model, "temperature": 0, "ignore_eos": True, "seed": 0}
        return await self.client.complete({**body, **fields})


@dataclass(frozen=True)
class Load:
    """One thing to measure.

    Attributes:
        kind: one of ``LOADS`` or ``SPECULATIVE``.
        name: for people.
        sequence: tokens of the longest prompt and its answer.
        sequences: how many such are asked at once.
        prompt_tokens: computed in all, about, where nothing but what was computed for the same
            prompt is found in a cache.
        run: measures it.
    """

    kind: str
    name: str
    sequence: int
    sequences: int
    prompt_tokens: int
    run: Callable[[Subject], Awaitable[list[Figure]]]


def prefill_name(length: int) -> str:
    """How a prefill load is called."""
    return f"prefill of {length:,}"


def decode_name(context: int, streams: int, *, speculating: bool = False) -> str:
    """How a decode load is called."""
    name = f"decode at {context:,}, {streams} stream{'s' if streams > 1 else ''}"
    return f"{name}, speculating" if speculating else name


async def warm_up(subject: Subject, prompts: Prompts) -> int:
    """Two answers of 16 tokens to 256 random ones.

    Then a small text is sent. Returns by how many tokens the server's count of it is above the
    model's own tokenizer's; anything but 0 means that servers don't read texts alike.
    """
    length, tokens = _WARM_UP
    for _ in range(2):
        await subject.ask(prompt=prompts.random_tokens(length), max_tokens=tokens)
    asked = keystroke_fields("fim", _TEXT, "", _TEXT, subject.client.sentinels)
    answer = await subject.ask(**asked, max_tokens=1)
    return answer.prompt_tokens - prompts.count(asked["prompt"])


def loads_for(options: PeersOptions, prompts: Prompts, layouts: Sequence[str]) -> list[Load]:
    """Everything that ``options`` ask for, in the order to run it.

    Args:
        layouts: the ways of asking that the server understands.
    """
    loads: list[Load] = []
    if "prefill" in options.loads:
        loads += [_prefill(options, prompts, length) for length in options.prefill]
    if "decode" in options.loads:
        for context in sorted(options.contexts):
            loads += [
                _decode(options, prompts, context, streams) for streams in sorted(options.streams)
            ]
            loads.append(_decode(options, prompts, context, 1, kind=SPECULATIVE))
    if "keystroke" in options.loads:
        loads.append(_keystroke(options, prompts, layouts))
    if "rounds" in options.loads:
        loads += [_rounds(options, prompts, layouts, users) for users in options.users]
    if "session" in options.loads:
        loads.append(_session(options, prompts, layouts))
    return loads


def _prefill(options: PeersOptions, prompts: Prompts, length: int) -> Load:
    name = prefill_name(length)

    async def run(subject: Subject) -> list[Figure]:
        rates = []
        for repeat in range(options.repeats):
            subject.progress(f"{name}, run {repeat + 1} of {options.repeats}")
            answer = await subject.ask(prompt=prompts.random_tokens(length), max_tokens=1)
            rates.append(length / answer.ttft_seconds)
        return [figure("prefill", name, TOKENS_PER_SECOND, rates)]

    return Load("prefill", name, length + 1, 1, length * options.repeats, run)


def _decode(
    options: PeersOptions, prompts: Prompts, context: int, streams: int, *, kind: str = "decode"
) -> Load:
    room = max(options.contexts) + options.decoded
    name = decode_name(context, streams, speculating=kind == SPECULATIVE)

    async def run(subject: Subject) -> list[Figure]:
        pieces = [prompts.code_tokens(stream, context, room) for stream in range(streams)]
        for number, piece in enumerate(pieces):
            subject.progress(f"{name}, prompt {number + 1} of {streams}")
            await subject.ask(prompt=piece, max_tokens=1)
        rates = []
        for repeat in range(options.repeats):
            subject.progress(f"{name}, run {repeat + 1} of {options.repeats}")
            rates.append(rate_together(await _together(subject, pieces, options.decoded)))
        bound = None
        if kind == "decode":
            bound = subject.bound(context + options.decoded / 2, streams)
        return [figure(kind, name, TOKENS_PER_SECOND, rates, bound=bound)]

    return Load(kind, name, context + options.decoded, streams, context * streams, run)


async def _together(
    subject: Subject, pieces: Sequence[list[int]], tokens: int
) -> list[Measurement]:
    """All streams at once; every one has ended when this returns or raises."""
    asked = (subject.ask(prompt=piece, max_tokens=tokens) for piece in pieces)
    answers: list[Measurement] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


def rate_together(answers: Sequence[Measurement]) -> float:
    """Tokens a second of all answers while all of them were being written.

    That is from the last first token to the first last one. An answer's tokens are spread evenly
    over the messages it came in, and over the time between two messages.

    Raises:
        MidfillError: there was hardly such a time, so that it would say nothing.
    """
    start = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    tokens = 0.0
    for answer in answers:
        so_far = np.linspace(0, answer.completion_tokens - 1, len(answer.arrivals))
        before, after = np.interp((start, end), answer.arrivals, so_far)
        tokens += float(after - before)
    if end <= start or tokens < sum(answer.completion_tokens for answer in answers) / 4:
        raise MidfillError("the streams were not decoded at the same time")
    return tokens / (end - start)


def _keystroke(options: PeersOptions, prompts: Prompts, layouts: Sequence[str]) -> Load:
    tokens = options.document_tokens
    name = f"{CHARACTERS} characters typed into {tokens:,} tokens"
    used = [layout for layout in ("fim", "efim", "native") if layout in layouts]
    strokes = dict.fromkeys(used, options.keystrokes)
    strokes["fim"] = max(2, options.keystrokes // 4)  # each computes half the document

    async def run(subject: Subject) -> list[Figure]:
        figures = []
        for layout in used:
            subject.progress(f"{name}, {layout}")
            answers = await _type(subject, prompts, layout, tokens, strokes[layout])
            first = [answer.ttft_seconds * 1000 for answer in answers]
            rest = [(answer.total_seconds - answer.ttft_seconds) * 1000 for answer in answers]
            figures.append(figure("keystroke", name, "TTFT ms", first, layout=layout))
            figures.append(figure("keystroke", name, f"{FURTHER} more ms", rest, layout=layout))
        return figures

    computed = {"fim": tokens // 2 * strokes["fim"] + tokens}
    total = sum(computed.get(layout, tokens) for layout in used)
    return Load("keystroke", name, tokens + options.keystrokes * CHARACTERS + _SLACK, 1, total, run)


async def _type(
    subject: Subject, prompts: Prompts, layout: str, tokens: int, strokes: int
) -> list[Measurement]:
    """Open a document no server has seen, type into it; the measured answers after each stroke."""
    head, typed, suffix = prompts.document(tokens, strokes * CHARACTERS)
    head = f"# {uuid.uuid4()}\n{head}"
    answers = []
    for stroke in range(strokes + 1):
        rest = typed[: stroke * CHARACTERS]
        asked = keystroke_fields(layout, head, rest, suffix, subject.client.sentinels)
        answers.append(await subject.ask(**asked, max_tokens=1 + FURTHER))
    return answers[1:]


def keystroke_fields(
    layout: str, head: str, rest: str, suffix: str, sentinels: tuple[str, str, str] | None
) -> dict[str, Any]:
    """The part of a request that says what is around the caret; ``rest`` was typed after head."""
    if layout == "native":
        return {"prompt": head + rest, "suffix": suffix}
    assert sentinels is not None
    pre, suf, mid = sentinels
    before, after = (head, rest) if layout == "efim" else (head + rest, "")
    prompt = f"{pre}{before}{suf}{suffix}{mid}{after}"
    return {"prompt": prompt, "midfill": {"layout": "verbatim"}}


def _rounds(options: PeersOptions, prompts: Prompts, layouts: Sequence[str], users: int) -> Load:
    name = f"rounds, {users} user{'s' if users > 1 else ''}"
    used: tuple[Layout, ...] = tuple(layout for layout in LAYOUTS if layout in layouts)
    longest = prompts.longest(standard_library_documents(users, seed=options.seed))

    async def run(subject: Subject) -> list[Figure]:
        load = RoundsOptions(
            layouts=used,
            users=users,
            rounds=options.rounds,
            output_tokens=options.output_tokens,
            repeats=options.round_repeats,
            sentinels=subject.client.sentinels,
            seed=options.seed,
        )
        report = await measure_rounds(
            subject.client, load, lambda what: subject.progress(f"{name}: {what}")
        )
        figures = []
        for layout, result in report.layouts.items():
            later = [seconds * 1000 for seconds in result.ttft_by_round[1:]]
            figures.append(figure("rounds", name, "wall s", result.runs, layout=layout))
            if later:
                figures.append(figure("rounds", name, "later TTFT ms", later, layout=layout))
        return figures

    prompt = longest // 2 + longest // 2 * options.rounds // 7
    computed = {"fim": prompt * options.rounds}
    total = sum(computed.get(layout, prompt) for layout in used) * users * options.round_repeats
    return Load("rounds", name, longest + _SLACK + options.output_tokens, users, total, run)


def _session(options: PeersOptions, prompts: Prompts, layouts: Sequence[str]) -> Load:
    name = f"editing session of {options.session}"
    longest = prompts.longest(standard_library_documents(_SESSION_FILES, seed=options.seed))
    names = {"psm": "psm", "native": "planner"}
    used = [layout for layout in names if layout in layouts]

    async def run(subject: Subject) -> list[Figure]:
        figures = []
        for layout in used:
            replayed = await replay_edits(
                subject.client,
                rounds=options.session,
                output_tokens=options.output_tokens,
                seed=options.seed,
                names=[names[layout]],
                progress=lambda what: subject.progress(f"{name}: {what}"),
            )
            (result,) = replayed.values()
            for measure, value in (
                ("TTFT ms", result.ttft_seconds * 1000),
                ("p90 TTFT ms", result.ttft_p90_seconds * 1000),
                ("wall s", result.wall_seconds),
            ):
                figures.append(figure("session", name, measure, [value], layout=layout))
        return figures

    # Where the caret jumps about, PSM computes some four tenths of its prompts again.
    total = sum(longest * (options.session * 4 // 10 if each == "psm" else 2) for each in used)
    sequence = longest + longest // 4 + options.output_tokens
    return Load("session", name, sequence, 1, total, run)
