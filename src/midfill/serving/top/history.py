"""Snapshots of a server's metrics; rates, ratios and percentiles of the last seconds from them."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from math import inf

from prometheus_client.parser import text_string_to_metric_families

from midfill.errors import MidfillError

COUNTERS_AND_GAUGES = (
    "num_requests_running", "num_requests_waiting", "num_requests_background", "queued_tokens",
    "kv_slots", "kv_slots_cached", "kv_cache_usage_perc",
    "prompt_tokens_total", "generation_tokens_total", "computed_tokens_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "steps_total", "busy_seconds_total", "engine_restarts_total", "request_success_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "states", "states_used", "state_snapshots",
    "state_snapshots_reused_total", "state_snapshots_evicted_total",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
)
RESPONSES = "http_requests_total"

# Most of what a server with many tenants writes is of no interest here, and parsing is slow.
_NAMES = (*COUNTERS_AND_GAUGES, RESPONSES, *(f"{name}_bucket" for name in HISTOGRAMS))
_WANTED = re.compile(rf"midfill:(?:{'|'.join(_NAMES)})[{{ ]")


class ServerGoneError(MidfillError):
    """No midfill server answers."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metrics at one moment, without the ``midfill:`` before their names.

    Attributes:
        time: ``time.monotonic()``'s.
        model: name of the served model.
        tenants: all names of tenants in the server's order; one empty name without keys.
        values: counters and gauges by name and tenant, "" where they have none.
        buckets: cumulative counts by histogram and tenant, by upper bound.
        responses: HTTP responses by status.
    """

    time: float
    model: str = ""
    tenants: tuple[str, ...] = ()
    values: Mapping[tuple[str, str], float] = field(default_factory=dict)
    buckets: Mapping[tuple[str, str], Mapping[float, float]] = field(default_factory=dict)
    responses: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str, tenant: str | None = None) -> float:
        """Return a metric of one tenant, or of all; 0 if the server has none."""
        if tenant is not None:
            return self.values.get((name, tenant), 0.0)
        return sum(value for (each, _), value in self.values.items() if each == name)

    def cumulative_counts(self, name: str, tenant: str | None = None) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, ascending."""
        counts: dict[float, float] = {}
        for (each, owner), bounds in self.buckets.items():
            if each == name and tenant in (None, owner):
                for bound, count in bounds.items():
                    counts[bound] = counts.get(bound, 0.0) + count
        return dict(sorted(counts.items()))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: the key goes to the address that was named."""

    def redirect_request(self, *_: object) -> None:
        """Return no further request."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def read_snapshot(url: str, api_key: str | None = None, timeout: float = 5.0) -> Snapshot:
    """Read a server's metrics.

    Args:
        url: the server.
        api_key: sent along; None sends none.
        timeout: in seconds.

    Raises:
        ServerGoneError: nothing answers there, or it is no midfill server.
    """
    address = f"{url.rstrip('/')}/metrics"
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(address, headers=headers)
        with _OPENER.open(request, timeout=timeout) as response:
            text = response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ServerGoneError(
                f"{address} needs an API key that reads metrics: --api-key"
            ) from None
        raise ServerGoneError(f"{address} answers with status {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        message = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise ServerGoneError(
            f"no server answers at {url} ({message}); start one with midfill serve, or name another"
            " with --url"
        ) from None
    snapshot = parse_snapshot(text, time.monotonic())
    if not snapshot.tenants:
        raise ServerGoneError(f"{url} is not a midfill server: {address} has none of its metrics")
    return snapshot


def parse_snapshot(text: str, now: float) -> Snapshot:
    """Return the metrics of a text in Prometheus' format, read at time ``now``.

    Raises:
        ServerGoneError: it is no such text.
    """
    lines = [line for line in text.splitlines() if _WANTED.match(line)]
    values: dict[tuple[str, str], float] = {}
    buckets: dict[tuple[str, str], dict[float, float]] = {}
    responses: dict[str, float] = {}
    tenants: dict[str, None] = {}
    model = ""
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                name = sample.name.removeprefix("midfill:")
                tenant = sample.labels.get("tenant", "")
                model = sample.labels.get("model_name", model)
                if name == "num_requests_running":
                    tenants[tenant] = None
                if name == RESPONSES:
                    status = sample.labels.get("status", "")
                    responses[status] = responses.get(status, 0.0) + sample.value
                elif name.endswith("_bucket"):
                    bounds = buckets.setdefault((name.removesuffix("_bucket"), tenant), {})
                    bounds[float(sample.labels["le"])] = sample.value
                else:
                    values[name, tenant] = values.get((name, tenant), 0.0) + sample.value
    except (ValueError, KeyError):  # whatever the parser finds wrong, and a bucket without bound
        raise ServerGoneError("the server's metrics are not in Prometheus' format") from None
    return Snapshot(now, model, tuple(tenants), values, buckets, responses)


class History:
    """The last snapshots of one server.

    Args:
        span: seconds that are remembered, and that rates and percentiles are of.
    """

    def __init__(self, span: float) -> None:
        self._span = span
        self._snapshots: list[Snapshot] = []

    def add(self, snapshot: Snapshot) -> None:
        """Add the newest snapshot; at least one older one is kept, too."""
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and self._snapshots[0].time < snapshot.time - self._span:
            del self._snapshots[0]

    @property
    def last(self) -> Snapshot:
        """The newest snapshot."""
        return self._snapshots[-1]

    def rate(self, name: str, tenant: str | None = None) -> float | None:
        """Return a counter's growth per second; None while there is one snapshot."""
        return self._per_second(lambda snapshot: snapshot.value(name, tenant))

    def response_rate(self, condition: Callable[[str], bool]) -> float | None:
        """Return the HTTP responses per second whose status meets a condition."""
        return self._per_second(
            lambda snapshot: sum(
                count for status, count in snapshot.responses.items() if condition(status)
            )
        )

    def ratio(self, part: str, whole: str, tenant: str | None = None) -> float | None:
        """Return a counter's growth as a share of another's; None if that has not grown."""
        grown = self._growth(lambda snapshot: snapshot.value(whole, tenant))
        if grown <= 0:
            return None
        return self._growth(lambda snapshot: snapshot.value(part, tenant)) / grown

    def percentile(self, name: str, share: float, tenant: str | None = None) -> float | None:
        """Return a percentile of a histogram's new values, interpolated inside its bucket.

        None if there are no new values. What is above the last bound counts as that bound.
        """
        series = [snapshot.cumulative_counts(name, tenant) for snapshot in self._snapshots]
        bounds = list(series[-1])
        counts = [_growth([each.get(bound, 0.0) for each in series]) for bound in bounds]
        if not counts or counts[-1] <= 0:
            return None
        wanted = share * counts[-1]
        place = next(place for place, count in enumerate(counts) if count >= wanted)
        below, above = (bounds[place - 1] if place else 0.0), bounds[place]
        if above == inf:
            return below
        before = counts[place - 1] if place else 0.0
        return below + (wanted - before) / (counts[place] - before) * (above - below)

    def _per_second(self, value: Callable[[Snapshot], float]) -> float | None:
        seconds = self._snapshots[-1].time - self._snapshots[0].time
        return self._growth(value) / seconds if seconds > 0 else None

    def _growth(self, value: Callable[[Snapshot], float]) -> float:
        return _growth([value(snapshot) for snapshot in self._snapshots])


def _growth(values: list[float]) -> float:
    """Return by how much a counter has grown; one that is smaller than before began again at 0."""
    return sum(now if now < before else now - before for before, now in pairwise(values))
