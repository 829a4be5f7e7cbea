"""bench serving: a simulated load from the command line, and what is refused before it."""

from pathlib import Path

import msgspec
import pytest
from tiny_checkpoints import write_tiny
from typer.testing import CliRunner

from midfill.system.machine import describe_machine
from midfill_lab.bench.serving.report import ServingReport
from midfill_lab.bench.serving.step_costs import StepCosts
from midfill_lab.cli.bench.app import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate", "--check"], "--check runs the load both ways"),
        (["--simulate", "--url", "http://127.0.0.1:1/v1"], "nothing is known to simulate it"),
        (["--check", "--endpoint", "chat"], "--endpoint chat can't be simulated"),
        (["--api-key", "k"], "--api-key is for a server at --url"),
        (["--hints"], "--hints is for a server at --url"),
        (["--batch-layout", "padded"], "--batch-layout is for --simulate"),
        (["--goodput", "ttfb:3"], "--goodput names ttfb"),
        (["--request-rate", "0"], "must be above 0"),
    ],
)
def test_options_of_serving_that_do_not_fit(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["serving", *arguments]).exception
    assert message in str(error)


def test_a_simulated_load(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    costs = StepCosts(
        model="tiny", machine=describe_machine(), engine="made-up", slots=4096, slot_bytes=100,
        rows=(0.001,) * 9, output=1e-4, request=0.0, key_read=0.0, key_pair=0.0,
    )  # fmt: skip
    (tmp_path / "costs.json").write_bytes(msgspec.json.encode(costs))
    arguments = [
        "serving", str(folder), "--simulate", "--step-costs", str(tmp_path / "costs.json"),
        "--requests", "6", "--characters", "100", "--goodput", "ttft:200",
        "--scheduler", "layered-prefill", "--json", str(tmp_path / "load.json"),
        "--plot", str(tmp_path / "load.png"), "--docs", str(tmp_path / "page.md"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "independent: latency" in done.output
    report = msgspec.json.decode((tmp_path / "load.json").read_bytes(), type=ServingReport)
    assert report.runs[0].metrics.completed == 6
    assert "--scheduler layered-prefill" in report.settings
    assert "<!-- serving -->" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
