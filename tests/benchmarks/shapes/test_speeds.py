"""benchmarks shape-speeds: a line for each model, beside other servers."""

from pathlib import Path

import msgspec
import pytest
from peer_reports import peers_report
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from midfill_lab.bench.peers.results import PeersReport, figure
from midfill_lab.reporting import write_json


def with_prefill(model: str) -> PeersReport:
    """A report in which midfill computes 500 tokens/s of a prompt, and llama.cpp 400."""
    report = peers_report()
    speeds = {"midfill": 500.0, "llama.cpp": 400.0}
    servers = [
        msgspec.structs.replace(
            server,
            figures=[
                *server.figures,
                *(
                    [figure("prefill", "prefill of 512", "tokens/s", [speeds[server.name]])]
                    if server.name in speeds
                    else []
                ),
            ],
        )
        for server in report.servers
    ]
    return msgspec.structs.replace(report, model=model, servers=servers)


def run(*arguments: str | Path) -> tuple[str, str]:
    """Return what a call prints, and the error that it ends with."""
    result = CliRunner().invoke(make_app("shape-speeds"), ["shape-speeds", *map(str, arguments)])
    return result.output, str(result.exception)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.json" for name in ("a", "b")]
    for path in paths:
        write_json(path, with_prefill(f"random-{path.stem}"))
    return paths


def test_each_model_has_a_line_with_ratios_to_each_peer(files: list[Path]) -> None:
    lines = run(*files)[0].splitlines()
    assert lines[0] == (
        "| shape | read per token | peak memory | decode | share | llama.cpp, decode | prompts |"
        " llama.cpp, prompts |"
    )
    # 200 tokens/s of 100 MB each, of 20 GB/s.
    cells = "100 MB | 2.0 GB | 200 | 100% | 50.0 (4.00x) | 500 | 400 (1.25x) |"
    assert lines[2:4] == [f"| a | {cells}", f"| b | {cells}"]


def test_the_table_goes_into_its_section(files: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- shape-speeds -->\nold\n<!-- /shape-speeds -->\nafter\n")
    run(*files, "--docs", page)
    text = page.read_text()
    assert text.startswith("before\n<!-- shape-speeds -->\n| shape |")
    assert text.endswith("<!-- /shape-speeds -->\nafter\n")


def test_a_run_without_midfills_figures_is_refused(files: list[Path]) -> None:
    write_json(files[1], peers_report())
    assert run(*files)[1].startswith("m: midfill's decode and prefill are missing")
