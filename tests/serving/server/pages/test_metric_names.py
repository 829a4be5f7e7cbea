"""The dashboard and the one for Grafana ask for metrics that the server has."""

import json
import re
from pathlib import Path

from running_server import RunningServer

ROOT = Path(__file__).parents[4]
NAME = re.compile(r"^(midfill:\w+)", re.MULTILINE)


def metrics_after_an_answer(server: RunningServer) -> set[str]:
    """Return the names of all metrics; some exist only once something was counted."""
    server.complete(prompt="a", max_tokens=2)
    # A request is counted once its whole response is sent.
    server.wait_for(lambda: "midfill:http_requests_total{" in server.get("/metrics").text)
    return set(NAME.findall(server.get("/metrics").text))


def test_grafanas_dashboard_asks_for_metrics_that_exist(server: RunningServer) -> None:
    served = metrics_after_an_answer(server)
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"midfill:\w+", query)}
    assert len(asked) > 15
    assert asked <= served


def test_the_dashboard_asks_for_metrics_that_exist(server: RunningServer) -> None:
    served = {name.removeprefix("midfill:") for name in metrics_after_an_answer(server)}
    sources = [ROOT / "web" / "src" / name for name in ("panels.ts", "dashboard.ts")]
    text = "".join(source.read_text("utf-8") for source in sources)
    asked = set(re.findall(r'"([a-z0-9]+(?:_[a-z0-9]+){1,})"', text))
    histograms = {name.removesuffix("_bucket") for name in served if name.endswith("_bucket")}
    assert len(asked) > 12
    assert asked <= served | histograms | {"model_name"}
