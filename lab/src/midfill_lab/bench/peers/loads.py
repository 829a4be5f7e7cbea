"""The loads that servers are compared on, each measured from outside over HTTP.

    prefill    random tokens, one token out: prompt tokens per second until the first token
    decode     streams that continue real code greedily: tokens per second of all of them together
               while all of them decode; prompts are in the cache before
    keystroke  ten characters typed into a document, nine tokens out: time to the first token, and
               to the eight after it
    rounds     EFIM's load, see ``midfill_lab.bench.rounds``
    session    an editing session, see ``midfill_lab.bench.edits``

Prompts of the last three are laid out by the client: "fim" or "psm", PRE prefix SUF suffix MID as
most clients send it, and "efim", PRE head SUF suffix MID rest, the cheapest that a client can do.
midfill also gets "native": prefix and suffix as they are.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from midfill.errors import MidfillError
from midfill_lab.bench.clients import HttpClient, Measurement
from midfill_lab.bench.documents import Prompts, standard_library_documents
from midfill_lab.bench.edits import replay_edits
from midfill_lab.bench.peers.results import (
    SPECULATIVE,
    TOKENS_PER_SECOND,
    Figure,
    PeersOptions,
    figure,
)
from midfill_lab.bench.rounds import LAYOUTS, Layout, RoundsOptions, layout_fields, measure_rounds

LAID_OUT = ("fim", "efim", "psm")
"""Layouts that a client makes with the model's FIM tokens, for any server."""
ALL_LAYOUTS = (*LAID_OUT, "native")

CHARACTERS = 10
FURTHER = 8
_SESSION_FILES = 6
_SLACK = 64
_WARM_UP = (256, 16)
_ATTEMPTS = 3
MIN_SEQUENCE = sum(_WARM_UP)
"""Tokens that the longest sequence of a server must have room for, whatever the loads."""
_TEXT = "def add(a, b):\n    return a + b  # caf\u00e9\n\n\nprint(add(1, 22))\n"


class NoOverlapError(MidfillError):
    """Streams that were requested together were not decoded at the same time."""


@dataclass(frozen=True)
class Subject:
    """A running server.

    Attributes:
        client: sends it requests.
        model: the name it serves the model by.
        bound: (tokens of context, streams) -> tokens/s that memory's bandwidth allows.
        progress: receives what is being measured.
    """

    client: HttpClient
    model: str
    bound: Callable[[float, int], float]
    progress: Callable[[str], None]

    async def ask(self, **fields: Any) -> Measurement:
        """Request a greedy completion that doesn't stop early."""
        body = {"model": self.model, "temperature": 0, "ignore_eos": True, "seed": 0}
        return await self.client.complete({**body, **fields})


@dataclass(frozen=True)
class Load:
    """A load to measure.

    Attributes:
        kind: one of ``LOADS`` or ``SPECULATIVE``.
        name: shown in tables.
        sequence: tokens of the longest prompt and its answer.
        sequences: how many are requested at once.
        prompt_tokens: about how many have to be computed in all.
        run: measures it.
    """

    kind: str
    name: str
    sequence: int
    sequences: int
    prompt_tokens: int
    run: Callable[[Subject], Awaitable[list[Figure]]]


def prefill_name(length: int) -> str:
    """Return the name of a prefill load."""
    return f"prefill of {length:,}"


def decode_name(context: int, streams: int, *, speculating: bool = False) -> str:
    """Return the name of a decode load."""
    name = f"decode at {context:,}, {streams} stream{'s' if streams > 1 else ''}"
    return f"{name}, speculating" if speculating else name


async def warm_up(subject: Subject, prompts: Prompts) -> int:
    """Request two answers of 16 tokens to 256 random ones, and one to a small text.

    Returns:
        By how many tokens the server counts the text longer than the model's own tokenizer does;
        other values than 0 mean that servers tokenize texts differently.
    """
    length, tokens = _WARM_UP
    for _ in range(2):
        await subject.ask(prompt=prompts.random_tokens(length), max_tokens=tokens)
    asked = layout_fields("fim", _TEXT, "", _TEXT, subject.client.sentinels)
    answer = await subject.ask(**asked, max_tokens=1)
    return answer.prompt_tokens - prompts.count(asked["prompt"])


def loads_for(options: PeersOptions, prompts: Prompts, layouts: Sequence[str]) -> list[Load]:
    """Return the loads that ``options`` name, in the order to run them.

    Args:
        layouts: those that the server understands.
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
    # A server may draft what it has answered before: there each run has a prompt of its own.
    sets = options.repeats if kind == SPECULATIVE else 1

    async def run(subject: Subject) -> list[Figure]:
        numbers = range(sets * streams)
        pieces = [prompts.code_tokens(number, context, room) for number in numbers]
        for number, piece in enumerate(pieces):
            subject.progress(f"{name}, prompt {number + 1} of {len(pieces)}")
            await subject.ask(prompt=piece, max_tokens=1)
        rates = []
        for repeat in range(options.repeats):
            subject.progress(f"{name}, run {repeat + 1} of {options.repeats}")
            first = repeat % sets * streams
            together = pieces[first : first + streams]
            rates.append(await _decode_together(subject, together, options.decoded))
        bound = None
        if kind == "decode":
            bound = subject.bound(context + options.decoded / 2, streams)
        return [figure(kind, name, TOKENS_PER_SECOND, rates, bound=bound)]

    return Load(kind, name, context + options.decoded, streams, context * streams * sets, run)


async def _decode_together(subject: Subject, pieces: Sequence[list[int]], tokens: int) -> float:
    """Return tokens per second of all streams together; tried again if they don't overlap.

    Raises:
        MidfillError: they hardly overlapped in any attempt.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(NoOverlapError):
            return rate_together(await _together(subject, pieces, tokens))
    return rate_together(await _together(subject, pieces, tokens))


async def _together(
    subject: Subject, pieces: Sequence[list[int]], tokens: int
) -> list[Measurement]:
    """Run all streams at once; all have ended when this returns or raises."""
    asked = (subject.ask(prompt=piece, max_tokens=tokens) for piece in pieces)
    answers: list[Measurement] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


def rate_together(answers: Sequence[Measurement]) -> float:
    """Return tokens per second of all answers together while all of them were being decoded.

    This is the time from the last stream's first token to the first stream's last one. An answer's
    tokens are spread evenly over its messages, and over the time between two messages.

    Raises:
        NoOverlapError: the streams hardly overlapped, so that the rate would say nothing.
    """
    start = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    tokens = 0.0
    for answer in answers:
        so_far = np.linspace(0, answer.completion_tokens - 1, len(answer.arrivals))
        before, after = np.interp((start, end), answer.arrivals, so_far)
        tokens += float(after - before)
    if end <= start or tokens < sum(answer.completion_tokens for answer in answers) / 4:
        raise NoOverlapError("the streams were not decoded at the same time")
    return tokens / (end - start)


def _keystroke(options: PeersOptions, prompts: Prompts, layouts: Sequence[str]) -> Load:
    tokens = options.document_tokens
    name = f"{CHARACTERS} characters typed into {tokens:,} tokens"
    used = [layout for layout in ("fim", "efim", "native") if layout in layouts]
    strokes = dict.fromkeys(used, options.keystrokes)
    strokes["fim"] = max(2, options.keystrokes // 4)  # each computes half of the document

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
    """Type into a document that is new to the server; return the answers after each stroke."""
    head, typed, suffix = prompts.document(tokens, strokes * CHARACTERS)
    head = f"# {uuid.uuid4()}\n{head}"
    answers = []
    for stroke in range(strokes + 1):
        rest = typed[: stroke * CHARACTERS]
        asked = layout_fields(layout, head, rest, suffix, subject.client.sentinels)
        answers.append(await subject.ask(**asked, max_tokens=1 + FURTHER))
    return answers[1:]


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
            (result,) = replayed.layouts.values()
            for measure, value in (
                ("TTFT ms", result.ttft_seconds * 1000),
                ("p90 TTFT ms", result.ttft_p90_seconds * 1000),
                ("wall s", result.wall_seconds),
            ):
                figures.append(figure("session", name, measure, [value], layout=layout))
        return figures

    # Where the caret jumps, PSM computes about four tenths of its prompts again.
    total = sum(longest * (options.session * 4 // 10 if each == "psm" else 2) for each in used)
    sequence = longest + longest // 4 + options.output_tokens
    return Load("session", name, sequence, 1, total, run)
