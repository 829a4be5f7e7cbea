"""Calls of a server's whole API with whatever its OpenAPI description allows, and forbids."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from requests.exceptions import ConnectionError
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

SECONDS = 300  # for an answer of a tiny model, also beside other work


@dataclass
class Calls:
    """What was called, and how it was answered.

    Attributes:
        statuses: answers by status.
        bugs: calls that no client should be able to make, as curl commands.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    bugs: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(self.statuses.values())


def operations(url: str) -> Iterator[Any]:
    """Yield all operations of a server."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.generation.update(modes=list(GenerationMode))
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        yield result.ok()


def call(operation: Any, calls: Calls, examples: int, number: int = 0) -> None:
    """Call an operation with valid and invalid parameters.

    Args:
        operation: one of ``operations``.
        calls: gets what happened.
        examples: how often, at most: an operation without parameters has one call.
        number: other numbers make other calls.
    """
    for mode in GenerationMode:
        with contextlib.suppress(Unsatisfiable):  # nothing about it can be wrong
            cases = operation.as_strategy(generation_mode=mode)
            _call(operation, cases, calls, examples // 2, number)


def _call(operation: Any, cases: Any, calls: Calls, examples: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=max(1, examples),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        if len(calls) % 2 and isinstance(case.body, dict):
            case.body = _tame(_thinned(case.body, random.Random(len(calls))))
        started = time.monotonic()
        try:
            response = case.call(timeout=2 * SECONDS)
        except ConnectionError:  # beside other work, a kept one was idle for too long
            calls.statuses[0] += 1
            return
        calls.statuses[response.status_code] += 1
        seconds = time.monotonic() - started
        if response.status_code >= 500 or seconds > SECONDS:
            answer = f"{response.status_code} in {seconds:.1f} s"
            calls.bugs.append(f"{answer}: {case.as_curl_command()}")

    ask()


_NEEDED = {"prompt", "messages", "model", "input_prefix", "input_suffix", "segments", "type"}


def _thinned(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a body with a few of its fields: with many, one is always wrong."""
    kept = {*rng.sample(list(body), min(len(body), rng.randrange(5))), *_NEEDED}
    thinned = {name: value for name, value in body.items() if name in kept}
    return thinned if _NEEDED & set(thinned) - {"model"} else {**thinned, "prompt": "a = "}


def _tame(value: Any, name: str = "") -> Any:
    """Return a body with smaller numbers and the model that is served, so that more is answered."""
    if isinstance(value, dict):
        return {key: _tame(item, key) for key, item in value.items()}
    if name == "model" and isinstance(value, str):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return abs(value) % 16 if isinstance(value, int) else abs(value) % 1
