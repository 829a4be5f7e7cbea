"""A short editing session replayed against a model: tokens computed and time to first token.

The requests are those of one session of the mix, one after the other. Each layout is a run of its
own; a unique first line in every file keeps it from finding another run's KV. ``planner`` sends
prefix and suffix and lets the server choose the cut; ``window`` lets it choose how much to show,
too, as it does by default. The other layouts are laid out here.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec

from midfill.errors import MidfillError
from midfill.lab.bench.clients import Client, Measurement, Sentinels
from midfill.lab.bench.documents import standard_library_documents
from midfill.lab.bench.edits import layouts
from midfill.lab.bench.edits.cost import PieceTokenizer
from midfill.lab.bench.edits.editor import Round
from midfill.lab.bench.edits.sessions import SESSION_KINDS, edit_session
from midfill.system.machine import describe_machine
from midfill.system.reporting.result_table import ResultTable

LAYOUTS = ("psm", "spm", "efim", "planner", "clairvoyant", "window")
_SERVERS_OWN = ("planner", "window")
_FILES = 2


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
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


async def replay_edits(
    client: Client,
    *,
    rounds: int = 60,
    output_tokens: int = 8,
    seed: int = 0,
    names: Sequence[str] = LAYOUTS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, ReplayResult]:
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
    return results


def _session(rounds: int, seed: int, sentinels: Sentinels) -> list[Round]:
    """Return a session over files without the sentinels' texts, which raw prompts would parse."""
    texts = standard_library_documents(3 * _FILES, seed=seed)
    clean = [text for text in texts if not any(name and name in text for name in sentinels)]
    sources = {f"{number}.py": text for number, text in enumerate(clean[:_FILES])}
    return edit_session(sources, SESSION_KINDS["mix"], rounds=rounds, seed=seed)


def _marked(rounds: Sequence[Round]) -> list[Round]:
    """Return the session with a unique first line in each file."""
    mark = uuid.uuid4()
    return [replace(one, prefix=f"# {mark} {one.document}\n{one.prefix}") for one in rounds]


def _payloads(
    name: str, rounds: Sequence[Round], sentinels: Sentinels | None
) -> list[dict[str, Any]]:
    if name in _SERVERS_OWN or sentinels is None:
        fields = {} if name == "window" else {"window": "as-sent"}
        return [{"prompt": one.prefix, "suffix": one.suffix, "midfill": fields} for one in rounds]
    efim = layouts.efim_cuts(rounds)
    planned = layouts.plan(rounds, PieceTokenizer()).cuts
    cuts = {
        "psm": layouts.psm_cuts(rounds),
        "spm": [0] * len(rounds),
        "efim": efim,
        "clairvoyant": layouts.best_cuts(rounds, [planned, efim]),
    }[name]
    pre, suf, mid = sentinels
    return [
        {
            "prompt": f"{pre}{one.prefix[:cut]}{suf}{one.suffix}{mid}{one.prefix[cut:]}",
            "midfill": {"layout": "verbatim"},
        }
        for one, cut in zip(rounds, cuts, strict=True)
    ]


def _summary(measured: Sequence[Measurement]) -> ReplayResult:
    ttfts = sorted(one.ttft_seconds for one in measured)
    return ReplayResult(
        requests=len(measured),
        prompt_tokens=sum(one.prompt_tokens for one in measured),
        computed_tokens=sum(one.computed_tokens for one in measured),
        ttft_seconds=median(ttfts),
        ttft_p90_seconds=ttfts[int(0.9 * len(ttfts))],
        wall_seconds=sum(one.total_seconds for one in measured),
    )


def replay_table(results: Mapping[str, ReplayResult], model: str) -> ResultTable:
    """A row per layout."""
    requests = next(iter(results.values())).requests
    return ResultTable(
        title="An editing session, replayed",
        rows=[_cells(layout, result) for layout, result in results.items()],
        caption=f"{model}, {requests} requests of one editing session, one after the other; "
        f"TTFT is the median; {describe_machine()}.",
    )


def _cells(layout: str, result: ReplayResult) -> dict[str, str]:
    return {
        "layout": layout,
        "prompt tokens": f"{result.prompt_tokens:,}",
        "computed": f"{result.computed_tokens:,}",
        "TTFT ms": f"{result.ttft_seconds * 1000:.1f}",
        "p90 ms": f"{result.ttft_p90_seconds * 1000:.1f}",
        "wall s": f"{result.wall_seconds:.1f}",
    }
