"""Rates, ratios and percentiles are of what is new."""

import http.server
import threading
from collections.abc import Iterator
from math import inf

import pytest

from midfill.serving.top.history import (
    History,
    ServerGoneError,
    Snapshot,
    parse_snapshot,
    read_snapshot,
)

HISTOGRAM = "time_to_first_token_seconds"


def history(*snapshots: Snapshot, span: float = 10.0) -> History:
    made = History(span)
    for snapshot in snapshots:
        made.add(snapshot)
    return made


def counted(time: float, **counters: float) -> Snapshot:
    return Snapshot(time, values={(name, ""): value for name, value in counters.items()})


def observed(time: float, *counts: float) -> Snapshot:
    bounds = dict(zip((0.1, 0.25, inf), counts, strict=True))
    return Snapshot(time, buckets={(HISTOGRAM, "a"): bounds})


def test_a_rate_needs_two_snapshots() -> None:
    assert history(counted(0, a=5)).rate("a") is None
    assert history(counted(0, a=5), counted(2, a=9)).rate("a") == 2


def test_a_counter_that_begins_again_has_grown_by_what_it_is() -> None:
    assert history(counted(0, a=50), counted(1, a=60), counted(2, a=4)).rate("a") == 7


def test_what_is_older_than_the_span_is_forgotten() -> None:
    snapshots = [counted(0, a=0), counted(9, a=900), counted(12, a=903)]
    assert history(*snapshots, span=5).rate("a") == 1
    assert history(counted(0, a=0), counted(100, a=200), span=5).rate("a") == 2


def test_ratios() -> None:
    before, after = counted(0, part=1, whole=10), counted(1, part=4, whole=14)
    assert history(before, after).ratio("part", "whole") == 0.75
    assert history(before, before).ratio("part", "whole") is None


def test_response_rates_are_of_chosen_statuses() -> None:
    snapshots = [Snapshot(0), Snapshot(2, responses={"200": 6, "429": 2})]
    assert history(*snapshots).response_rate(lambda status: status >= "400") == 1


@pytest.mark.parametrize(("share", "expected"), [(0.05, 0.05), (0.5, 0.175), (0.99, 0.25)])
def test_percentiles_lie_inside_their_bucket(share: float, expected: float) -> None:
    one = history(observed(0, 7, 8, 8), observed(1, 17, 98, 108))
    # 10 new values up to 0.1 s, 80 up to 0.25 s, 10 above.
    assert one.percentile(HISTOGRAM, share) == pytest.approx(expected)
    assert one.percentile(HISTOGRAM, share, "a") == pytest.approx(expected)


def test_there_is_no_percentile_of_nothing() -> None:
    one = history(observed(0, 1, 1, 1), observed(1, 1, 1, 1))
    assert one.percentile(HISTOGRAM, 0.5) is None
    assert one.percentile("another", 0.5) is None
    assert one.percentile(HISTOGRAM, 0.5, "b") is None


TEXT = """\
# HELP midfill:num_requests_running Answers that hold KV.
# TYPE midfill:num_requests_running gauge
midfill:num_requests_running{model_name="m",tenant="key-1"} 2.0
midfill:num_requests_running{model_name="m",tenant="a \\"b\\""} 3.0
midfill:kv_slots{model_name="m"} 100.0
midfill:unknown{model_name="m"} nonsense
midfill:request_success_total{finished_reason="stop",model_name="m",tenant="key-1"} 4.0
midfill:request_success_total{finished_reason="length",model_name="m",tenant="key-1"} 5.0
midfill:http_requests_total{model_name="m",status="200",tenant="key-1"} 6.0
midfill:http_requests_total{model_name="m",status="200",tenant=""} 1.0
midfill:time_to_first_token_seconds_bucket{le="0.1",model_name="m",tenant="key-1"} 1.0
midfill:time_to_first_token_seconds_bucket{le="+Inf",model_name="m",tenant="key-1"} 2.0
midfill:time_to_first_token_seconds_bucket{le="0.1",model_name="m",tenant="x"} 3.0
"""


def test_values_are_by_tenant_and_in_all() -> None:
    snapshot = parse_snapshot(TEXT, 5.0)
    assert (snapshot.time, snapshot.model) == (5.0, "m")
    assert snapshot.tenants == ("key-1", 'a "b"')
    assert snapshot.value("num_requests_running") == 5
    assert snapshot.value("num_requests_running", 'a "b"') == 3
    assert snapshot.value("request_success_total", "key-1") == 9
    assert snapshot.value("kv_slots") == 100
    assert snapshot.value("no_such_metric") == 0
    assert snapshot.responses == {"200": 7}


def test_counts_of_a_histogram() -> None:
    name = "time_to_first_token_seconds"
    snapshot = parse_snapshot(TEXT, 0.0)
    assert snapshot.cumulative_counts(name) == {0.1: 4, float("inf"): 2}
    assert snapshot.cumulative_counts(name, "key-1") == {0.1: 1, float("inf"): 2}
    assert snapshot.cumulative_counts(name, "nobody") == {}


@pytest.fixture(scope="module")
def other_server() -> Iterator[str]:
    """Something else that listens."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/prometheus/metrics"
            if self.path == "/elsewhere/metrics":
                self.send_response(307)
                self.send_header("location", "/prometheus/metrics")
            else:
                self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(b"up 1.0\n" if known else b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "complaint"),
    [("", "answers with status 404"), ("/prometheus/", "is not a midfill server")],
)
def test_another_server_is_told_from_midfill(other_server: str, path: str, complaint: str) -> None:
    with pytest.raises(ServerGoneError, match=complaint):
        read_snapshot(other_server + path)


def test_a_redirect_is_not_followed(other_server: str) -> None:
    with pytest.raises(ServerGoneError, match="answers with status 307"):
        read_snapshot(f"{other_server}/elsewhere", "key")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://", "nonsense://a", "http://[::"])
def test_a_server_that_is_not_there_is_one_line(url: str) -> None:
    with pytest.raises(ServerGoneError) as raised:
        read_snapshot(url)
    assert str(raised.value).startswith(f"no server answers at {url} (")
    assert "\n" not in str(raised.value)
