"""The dashboard and the one for Grafana ask for metrics that the server has."""

import json
import re
from pathlib import Path

from running_server import RunningServer

from midfill.engine.request import EngineStats
from midfill.serving.server.metrics import Metrics

ROOT = Path(__file__).parents[4]
NAME = re.compile(r"^(midfill:\w+)", re.MULTILINE)


class Hybrid:
    """The numbers of an engine whose model has states."""

    restarts = queued_tokens = 0

    def __init__(self) -> None:
        self.stats = EngineStats(states_total=1)
        self.tenants = dict[str, object]()


def metrics_after_an_answer(server: RunningServer) -> set[str]:
    """Return the names of all metrics; some exist only once something was counted."""
    server.complete(prompt="a", max_tokens=2)
    # A request is counted once its whole response is sent.
    server.wait_for(lambda: "midfill:http_requests_total{" in server.get("/metrics").text)
    names = set(NAME.findall(server.get("/metrics").text))
    of_hybrids = {name for name, _ in Metrics("m", Hybrid(), ()).sums() if "state" in name}  # type: ignore[arg-type]
    assert len(of_hybrids) == 5
    assert not of_hybrids & names
    return names | of_hybrids


def test_grafanas_dashboard_asks_for_metrics_that_exist(server: RunningServer) -> None:
    served = metrics_after_an_answer(server)
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"midfill:\w+", query)}
    assert len(asked) > 15
    assert asked <= served


def read(source: str) -> str:
    """Return a source of the dashboard."""
    return (ROOT / "web" / "src" / source).read_text("utf-8")


def named_in(text: str) -> set[str]:
    """Return the metrics that a source names."""
    return set(re.findall(r'"([a-z0-9]+(?:_[a-z0-9]+){1,})"', text)) - {"model_name"}


def with_histograms(names: set[str]) -> set[str]:
    """Return names without their prefix, a histogram's buckets as the histogram, too."""
    plain = {name.removeprefix("midfill:") for name in names}
    return plain | {name.removesuffix("_bucket") for name in plain if name.endswith("_bucket")}


def test_the_dashboard_asks_for_metrics_that_exist(server: RunningServer) -> None:
    asked = named_in(read("panels.ts") + read("dashboard.ts"))
    assert len(asked) > 12
    assert asked <= with_histograms(metrics_after_an_answer(server))


def test_the_servers_history_has_all_that_is_drawn_and_nothing_else(
    server: RunningServer,
) -> None:
    served = metrics_after_an_answer(server)
    series = server.get("/metrics/history").json()["series"]
    kept = {one["name"] for one in series}
    assert kept <= served
    drawn = named_in(read("panels.ts").partition("export const PANELS")[2])
    drawn |= {"states"}  # one word, as titles and kinds of lines are
    assert drawn <= with_histograms(kept)
    assert {name.removeprefix("midfill:").removesuffix("_bucket") for name in kept} <= drawn
