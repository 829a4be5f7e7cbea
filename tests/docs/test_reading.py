"""docs/reading.md counts the files of one request, as they are."""

import os
import re
import signal
from pathlib import Path

import pytest
from doc_blocks import ROOT
from running_server import RunningServer, start

import midfill
from midfill.models.checkpoints.model_store import DEFAULT_MODEL

TRACED = ROOT / "tests" / "helpers" / "traced_files"
PACKAGE = Path(midfill.__file__).parent
PAGE = (ROOT / "docs" / "reading.md").read_text("utf-8")
MAX_FILES = 73
APART = ("runners/", "kernels/", "cli/", "system/")  # the runner; and what follows a start
TYPED = "def mean(values):\n    total = sum(values)\n    return total / le"
SUFFIX = "\n\n\nprint(mean([1, 2, 3]))\n"
WARM, TRACED_REQUESTS = 4, 3
BY_CHANCE = {
    "infill/cut_places.py", "serving/server/listening.py", "serving/server/startup.py",
    "system/logs.py",
}  # fmt: skip
"""Whether they run is chance: one looks for a new cut, two wait, one writes what is logged."""


def listed(process: str) -> set[str]:
    """Return the files that the page's table of a process lists."""
    table = PAGE.split(f"| in the {process} | files | |\n")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w/]+/)` \| (\d+) \| (.+) \|$", table, re.MULTILINE)
    files = {folder: re.findall(r"`(\w+\.py)`", names) for folder, _, names in rows}
    assert all(len(files[folder]) == int(count) for folder, count, _ in rows)
    return {folder + name for folder, names in files.items() for name in names}


SERVER, ENGINE = listed("server"), listed("engine's process")


def ask(server: RunningServer, missing: int) -> None:
    """Ask as an editor does that has ``missing`` characters still to type."""
    body = {"prompt": TYPED[: len(TYPED) - missing], "suffix": SUFFIX, "stream": True}
    server.post("/v1/completions", {**body, "max_tokens": 24}).raise_for_status()


def before_the_runner(trace: Path) -> set[str]:
    """Return the package's files in a trace, without those of the forward pass."""
    files = {Path(line) for line in trace.read_text("utf-8").splitlines()}
    own = {path.relative_to(PACKAGE).as_posix() for path in files if PACKAGE in path.parents}
    return {name for name in own if not name.startswith(APART)}


def test_the_numbers_are_those_of_the_tables() -> None:
    both, either = len(SERVER & ENGINE), len(SERVER | ENGINE)
    assert f"{either} files before the runner" in PAGE
    assert f"{len(SERVER)} of them run in the server" in PAGE
    assert f"{len(ENGINE)} in the engine's process, {both} in both" in PAGE
    assert either <= MAX_FILES


@pytest.mark.slow
@pytest.mark.real_model
def test_the_tables_have_the_files_that_run(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(TRACED), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("MIDFILL_TEST_TRACES", str(tmp_path))
        with start(DEFAULT_MODEL, "--kv-memory", "64MB") as server:
            for typed in range(WARM):
                ask(server, WARM + TRACED_REQUESTS - typed)
            server.wait_until_settled()
            processes = [server.process.pid, server.engine_process()]
            for process in processes:
                os.kill(process, signal.SIGUSR1)
            for typed in range(TRACED_REQUESTS):
                ask(server, TRACED_REQUESTS - typed)
            for process in processes:
                os.kill(process, signal.SIGUSR2)
            traces = [tmp_path / "server", tmp_path / "engine"]
            server.wait_for(lambda: all(trace.exists() for trace in traces))
    assert before_the_runner(traces[0]) - BY_CHANCE == SERVER - BY_CHANCE
    assert before_the_runner(traces[1]) == ENGINE
