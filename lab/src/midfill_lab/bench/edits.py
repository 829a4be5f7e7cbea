"""A short editing session replayed against a model: tokens computed and time to first token.

The requests are those of one session of the mix, one after the other. Each layout is a run of its
own; a unique first line in every file keeps it from finding another run's KV. ``planner`` sends
prefix and suffix and lets the server choose the cut; ``window`` lets it choose how much to show,
too, as it does by default. The other layouts are laid out here.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec

from midfill.errors import MidfillError
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.clients import Client, Measurement, Sentinels
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session
from midfill_lab.bench.rounds import layout_fields
from midfill_lab.reporting import ResultTable

LAYOUTS = ("psm", "spm", "efim", "planner", "window")
_SERVERS_OWN = ("planner", "window")
_FILES = 2


class EditsResult(msgspec.Struct, frozen=True, kw_only=True):
    """One layout's figures.

    Attributes:
        requests: how many.
        prompt_tokens, computed_tokens: over all requests, as the server counts them.
        ttft_seconds: median over the requests.
        ttft_p90_seconds: the 90th percentile.
        wall_seconds: of all requests, one after the other.
    """

    requests: int
    prompt_tokens: int
    computed_tokens: int
    ttft_seconds: float
    ttft_p90_seconds: float
    wall_seconds: float


class EditsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    layouts: dict[str, EditsResult]


async def replay_edits(
    client: Client,
    *,
    rounds: int = 60,
    output_tokens: int = 8,
    seed: int = 0,
    names: Sequence[str] = LAYOUTS,
    progress: Callable[[str], None] = lambda _: None,
) -> EditsReport:
    """Replay a session of the mix under each of the named layouts.

    Args:
        rounds: requests of the session.
        output_tokens: tokens of each answer, end-of-text ignored. What the model writes does not
            change the session: the next request is the recorded one.
        seed: which session.
        names: the layouts.
        progress: receives which layout is being replayed.

    Raises:
        MidfillError: the model refuses a request, or its FIM tokens are needed and not known.
    """
    if client.sentinels is None and set(names) - set(_SERVERS_OWN):
        raise MidfillError("laying prompts out takes the model's FIM tokens; name them")
    model = await client.model()
    await client.complete({"model": model, "prompt": "def", "max_tokens": 2})
    recorded = _session(rounds, seed, client.sentinels or ("", "", ""))
    results = {}
    for name in names:
        progress(name)
        session = _marked(recorded)
        body = {"model": model, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        measured = [
            await client.complete({**body, **payload})
            for payload in _payloads(name, session, client.sentinels)
        ]
        results[name] = _summary(measured)
    return EditsReport(model=model, machine=describe_machine(), layouts=results)


def _session(rounds: int, seed: int, sentinels: Sentinels) -> list[Round]:
    """Return a session over files without the sentinels' texts, which raw prompts would parse."""
    texts = standard_library_documents(3 * _FILES, seed=seed)
    clean = [text for text in texts if not any(name and name in text for name in sentinels)]
    sources = {f"{number}.py": text for number, text in enumerate(clean[:_FILES])}
    return edit_session(sources, SESSION_KINDS["mix"], rounds=rounds, seed=seed)


def _marked(rounds: Sequence[Round]) -> list[Round]:
    """Return the session with a unique first line in each file."""
    mark = uuid.uuid4()
    return [replace(edit, prefix=f"# {mark} {edit.document}\n{edit.prefix}") for edit in rounds]


def _payloads(
    name: str, rounds: Sequence[Round], sentinels: Sentinels | None
) -> list[dict[str, Any]]:
    if name in _SERVERS_OWN or sentinels is None:
        fields = {} if name == "window" else {"window": "as-sent"}
        return [
            {"prompt": edit.prefix, "suffix": edit.suffix, "midfill": fields} for edit in rounds
        ]
    cuts = {"psm": psm_cuts, "spm": lambda rounds: [0] * len(rounds), "efim": efim_cuts}[name]
    return [
        layout_fields("efim", edit.prefix[:cut], edit.prefix[cut:], edit.suffix, sentinels)
        for edit, cut in zip(rounds, cuts(rounds), strict=True)
    ]


def psm_cuts(rounds: Sequence[Round]) -> list[int]:
    """Return PSM's cuts: the whole prefix comes before the suffix."""
    return [len(edit.prefix) for edit in rounds]


def efim_cuts(rounds: Sequence[Round]) -> list[int]:
    """Return EFIM's cuts, as published: a file's first prefix stays in place while it can."""
    heads: dict[str, str] = {}
    cuts = []
    for edit in rounds:
        head = heads.get(edit.document)
        if head is None or not edit.prefix.startswith(head):
            head = heads[edit.document] = edit.prefix
        cuts.append(len(head))
    return cuts


def _summary(measured: Sequence[Measurement]) -> EditsResult:
    ttfts = sorted(measurement.ttft_seconds for measurement in measured)
    return EditsResult(
        requests=len(measured),
        prompt_tokens=sum(measurement.prompt_tokens for measurement in measured),
        computed_tokens=sum(measurement.computed_tokens for measurement in measured),
        ttft_seconds=median(ttfts),
        ttft_p90_seconds=ttfts[int(0.9 * len(ttfts))],
        wall_seconds=sum(measurement.total_seconds for measurement in measured),
    )


def edits_table(report: EditsReport) -> ResultTable:
    """Return a row per layout."""
    requests = next(iter(report.layouts.values())).requests
    return ResultTable(
        title="An editing session",
        rows=[_cells(layout, result) for layout, result in report.layouts.items()],
        caption=f"{report.model}, {requests} requests of one editing session, one after the other; "
        f"TTFT is the median; {report.machine}.",
    )


def _cells(layout: str, result: EditsResult) -> dict[str, str]:
    return {
        "layout": layout,
        "prompt tokens": f"{result.prompt_tokens:,}",
        "computed": f"{result.computed_tokens:,}",
        "TTFT ms": f"{result.ttft_seconds * 1000:.1f}",
        "p90 ms": f"{result.ttft_p90_seconds * 1000:.1f}",
        "wall s": f"{result.wall_seconds:.1f}",
    }
