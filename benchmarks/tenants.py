"""Can one tenant tell by the time of an answer what another one has sent?

A victim sends a document. An attacker, with a key of its own, then sends the very same one (a right
guess) and another of the same length (a wrong guess), in random order, and measures how long each
answer takes. For comparison it sends one of its own documents again. The answers have one token, so
that their time is the time to the first. Everything goes through the server's application and its
engine process; only the sockets are left out, whose noise would help the victim.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.arrays import Float64Array
from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.serving.options import ServeOptions
from midfill.serving.server.app import create_app
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.startup import open_service
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.cli.bench.options import JsonOption, LoadedModelOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_VICTIM, _ATTACKER = "victim", "attacker"
_PERMUTATIONS = 10_000
_FILES = 40
_WARM_UP = 5


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the attacker sees of its requests of one kind.

    Attributes:
        seconds: of each answer.
        cached: prompt tokens found in the cache, of all together.
        computed: prompt tokens that were computed, likewise.
    """

    seconds: list[float] = msgspec.field(default_factory=list)
    cached: int = 0
    computed: int = 0


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How two kinds of requests differ in time.

    Attributes:
        distance: Kolmogorov and Smirnov's: the largest distance of the two distribution functions.
        p: probability of such a distance if both kinds have one distribution.
        told_apart: how often the slower of a random pair is of the second kind; 0.5 is a coin.
    """

    distance: float
    p: float
    told_apart: float


class TenantsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        characters: of each document.
        guessed: what the victim has sent before, right guesses.
        random: what nobody has sent, wrong guesses.
        own: what the attacker itself has sent before.
        guesses: how guessed and random requests differ.
        control: how own and random ones do, which the method must see.
    """

    model: str
    machine: Machine
    load: float
    threads: int | None
    characters: int
    guessed: Asked
    random: Asked
    own: Asked
    guesses: Difference
    control: Difference


def measure_tenants(
    model: str,
    *,
    trials: int = 200,
    characters: int = 1500,
    threads: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> TenantsReport:
    """Serve ``model`` to two tenants and compare what one sees of guesses about the other.

    Raises:
        MidfillError: the model can't be found or loaded.
    """
    progress(f"loading {model}")
    adapter = resolve_adapter(model, None)
    options = ServeOptions(
        model=model,
        api_keys=(_VICTIM, _ATTACKER),
        options=ModelOptions(threads=threads, adapter=None if adapter is None else str(adapter)),
    )
    before = os.getloadavg()[0]
    asked = asyncio.run(_attack(options, resolve(model), trials, characters, seed, progress))
    guessed, unseen, own = asked
    return TenantsReport(
        model=model,
        machine=describe_machine(),
        load=max(before, os.getloadavg()[0]),
        threads=threads,
        characters=characters,
        guessed=guessed,
        random=unseen,
        own=own,
        guesses=compare(guessed.seconds, unseen.seconds, seed),
        control=compare(own.seconds, unseen.seconds, seed),
    )


async def _attack(
    options: ServeOptions,
    path: Path,
    trials: int,
    characters: int,
    seed: int,
    progress: Callable[[str], None],
) -> tuple[Asked, Asked, Asked]:
    """Return what the attacker sees of right guesses, wrong ones, and its own documents."""
    rng = random.Random(seed)
    documents = _Documents(characters, rng)
    keys = KeyRing(options.api_keys)
    found = {kind: Asked() for kind in ("guessed", "random", "own")}
    async with open_service(options, path, tenants=keys.tenants) as service:
        transport = httpx.ASGITransport(create_app(service, keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://bench") as client:
            ask = _Client(client)
            for _ in range(_WARM_UP):
                await ask(_ATTACKER, documents.new())
            for number in range(trials):
                if number % 20 == 0:
                    progress(f"trial {number + 1} of {trials}")
                secret, repeated = documents.new(), documents.new()
                await ask(_VICTIM, secret)
                await ask(_ATTACKER, repeated)
                kinds = [("guessed", secret), ("random", documents.new()), ("own", repeated)]
                for kind, document in rng.sample(kinds, 3):
                    found[kind] = _added(found[kind], await ask(_ATTACKER, document))
    return found["guessed"], found["random"], found["own"]


class _Documents:
    """Pieces of code, each with a first line of its own, so that no two begin alike."""

    def __init__(self, characters: int, rng: random.Random) -> None:
        self._texts = standard_library_documents(_FILES, shortest=2 * characters, longest=10**6)
        self._characters = characters
        self._rng = rng

    def new(self) -> str:
        text = self._rng.choice(self._texts)
        start = self._rng.randrange(len(text) - self._characters)
        return f"# {self._rng.getrandbits(64):020d}\n" + text[start : start + self._characters]


class _Client:
    """Sends documents as a key's completions of one token."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def __call__(self, key: str, document: str) -> tuple[float, int, int]:
        """Return seconds, cached and computed prompt tokens."""
        body = {"prompt": document, "suffix": "\n", "max_tokens": 1, "temperature": 0}
        started = time.perf_counter()
        response = await self._client.post(
            "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=None
        )
        seconds = time.perf_counter() - started
        report = response.raise_for_status().json()["midfill"]
        return seconds, report["cached_tokens"], report["computed_tokens"]


def _added(asked: Asked, seen: tuple[float, int, int]) -> Asked:
    seconds, cached, computed = seen
    return Asked(
        seconds=[*asked.seconds, seconds],
        cached=asked.cached + cached,
        computed=asked.computed + computed,
    )


def compare(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Difference:
    """Compare times that belong together in pairs.

    The distribution of the distance, if kinds make no difference, comes from exchanging the two
    times of random pairs (a permutation test): pairs were measured close together, so that the
    machine's drift is in both.
    """
    pairs = np.stack([np.asarray(first), np.asarray(second)])
    rng = np.random.default_rng(seed)
    distance = _distance(pairs)
    larger = 0
    for _ in range(_PERMUTATIONS):
        swapped = rng.random(pairs.shape[1]) < 0.5
        larger += _distance(np.where(swapped, pairs[::-1], pairs)) >= distance - 1e-12
    above = np.mean(pairs[1][:, None] > pairs[0][None, :])
    equal = np.mean(pairs[1][:, None] == pairs[0][None, :])
    return Difference(
        distance=distance,
        p=(larger + 1) / (_PERMUTATIONS + 1),
        told_apart=float(above + equal / 2),
    )


def _distance(pairs: Float64Array) -> float:
    """Return Kolmogorov and Smirnov's distance of two rows of equal length."""
    count = pairs.shape[1]
    order = np.argsort(pairs.ravel(), kind="stable")
    steps = np.where(order < count, 1, -1)
    values = pairs.ravel()[order]
    last_of_equals = np.append(values[1:] != values[:-1], True)
    return float(np.abs(np.cumsum(steps)[last_of_equals]).max() / count)


def tenants_table(report: TenantsReport) -> ResultTable:
    """Return the report as a table."""

    def row(name: str, asked: Asked, against: Difference | None) -> dict[str, str]:
        count = len(asked.seconds)
        return {
            "the attacker sends": name,
            "cached tokens": f"{asked.cached / count:.0f}",
            "computed tokens": f"{asked.computed / count:.0f}",
            "answer, median": f"{1000 * median(asked.seconds):.1f} ms",
            "distance": "" if against is None else f"{against.distance:.3f}",
            "p": "" if against is None else f"{against.p:.4f}",
            "told apart": "" if against is None else f"{100 * against.told_apart:.0f}%",
        }

    return ResultTable(
        rows=[
            row("what nobody has sent", report.random, None),
            row("what the victim has sent", report.guessed, report.guesses),
            row("what it has sent itself", report.own, report.control),
        ],
        title="A tenant that guesses what another one has sent",
        caption=(
            f"{report.model}, {len(report.random.seconds)} trials with documents of"
            f" {report.characters} characters; distance of the distributions of times from those of"
            " the first row (Kolmogorov, Smirnov), its probability if they are the same"
            f" (permutations of pairs), and how often the faster of two is not the first row's;"
            f" {report.machine}; load {report.load:.1f}."
        ),
    )


def tenants(
    model: LoadedModelOption = None,
    trials: Annotated[int, typer.Option(min=10, help="Guesses of each kind.")] = 200,
    characters: Annotated[int, typer.Option(min=100, help="Of each document.")] = 1500,
    seed: Annotated[int, typer.Option(help="All chance follows from it.")] = 0,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure whether one tenant can tell by the time of an answer what another one has sent."""

    with show_steps("loading") as progress:
        report = measure_tenants(
            model or DEFAULT_MODEL,
            trials=trials,
            characters=characters,
            threads=threads,
            seed=seed,
            progress=progress,
        )
    publish(report, tenants_table(report), section="tenants", json=json, docs=docs)
