"""No process of a server is left, however the benchmark ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import default_interrupt, wait_for

from midfill.errors import MidfillError
from midfill_lab.bench.peers.process import ServerProcess, free_port, session_processes


class TestProcess:
    def test_children_that_leave_the_group_are_ended_too(self, tmp_path: Path) -> None:
        script = (
            "import os, subprocess, time\n"
            "subprocess.Popen(['sleep', '60'], process_group=0)\n"
            "print('started', flush=True)\n"
            "time.sleep(60)\n"
        )
        command = [sys.executable, "-c", script]
        with ServerProcess(command, {}, free_port(), tmp_path / "log") as process:
            wait_for(lambda: "started" in process.log_text())
            leader = process._process.pid
            wait_for(lambda: len(session_processes(leader)) == 2)
            wait_for(lambda: process.peak_rss_bytes is not None)
        assert session_processes(leader) == []

    @pytest.mark.parametrize(("last", "written"), [("time.sleep(60)", True), ("", False)])
    def test_a_file_is_waited_for_until_it_is_there_or_nobody_writes_it(
        self, last: str, written: bool, tmp_path: Path
    ) -> None:
        path = tmp_path / "stored"
        writing = f"open({str(path)!r}, 'w')" if written else "print()"
        command = [sys.executable, "-c", f"import time; {writing}; {last}"]
        with ServerProcess(command, {}, free_port(), tmp_path / "log") as process:
            process.wait_for_file(path, 60)
            assert path.exists() == written == process.running

    def test_a_program_that_cannot_be_run_is_one_clear_line(self, tmp_path: Path) -> None:
        (tmp_path / "no-program").write_text("data")
        command = [str(tmp_path / "no-program")]
        with (
            pytest.raises(MidfillError, match="no-program can't be run: Permission denied"),
            ServerProcess(command, {}, free_port(), tmp_path / "log"),
        ):
            pass

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_ending_the_benchmark_ends_the_server(
        self, number: signal.Signals, tmp_path: Path
    ) -> None:
        script = (
            "import time\n"
            "from pathlib import Path\n"
            "from midfill_lab.bench.peers.process import ServerProcess\n"
            "from midfill.system.process import ended_by_sigterm\n"
            f"log = Path({str(tmp_path / 'log')!r})\n"
            "with ended_by_sigterm(), ServerProcess(['sleep', '60'], {}, 1, log) as process:\n"
            "    print(process._process.pid, flush=True)\n"
            "    time.sleep(60)\n"
        )
        benchmark = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=default_interrupt,
        )
        assert benchmark.stdout is not None
        session = int(benchmark.stdout.readline())
        assert session_processes(session) == [session]
        benchmark.send_signal(number)
        benchmark.wait(60)
        assert session_processes(session) == []
