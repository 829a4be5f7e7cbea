"""Snapshots: what is read of a server's metrics, and what is no server."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from midfill.serving.top.snapshot import ServerGoneError, parse_snapshot, read_snapshot

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


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://", "nonsense://a", "http://[::"])
def test_a_server_that_is_not_there_is_one_line(url: str) -> None:
    with pytest.raises(ServerGoneError) as raised:
        read_snapshot(url)
    assert str(raised.value).startswith(f"no server answers at {url} (")
    assert "\n" not in str(raised.value)
