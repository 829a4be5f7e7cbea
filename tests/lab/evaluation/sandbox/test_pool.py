"""The sandbox: a program passes if its function does, and nothing else comes of it.

Programs here do what they shouldn't for real. Those of ``EVERYWHERE`` fail however they are kept
apart; what the kernel alone can guarantee is tested where it permits namespaces.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from processes import wait_for

from midfill.errors import MidfillError
from midfill_lab.evaluation.sandbox.pool import Isolation, Limits, Program, Sandbox, Verdict

LIMITS = Limits(cpu_seconds=60, wall_seconds=60, memory_bytes=1 << 28, file_bytes=1 << 20)
SHORT_LIMITS = Limits(cpu_seconds=1, wall_seconds=1.5)
ENDLESS = {"while True: pass": "time limit", "import time\ntime.sleep(1000)": "wall time limit"}

EVERYWHERE = {
    "allocates without end": ("a = []\nwhile True: a.append(bytearray(10**7))", "MemoryError"),
    "writes a huge file": (
        "with open('x', 'wb') as f:\n    for _ in range(100): f.write(bytes(10**6))",
        "OSError",
    ),
    "reads standard input": ("input()", "EOFError"),
    "leaves before its tests": ("import os\nos._exit(0)", "ended before"),
    "leaves politely": ("raise SystemExit", "SystemExit"),
    "leaves politely with 0": ("import sys\nsys.exit(0)", "SystemExit"),
    "fails a test": ("assert 1 == 2", "AssertionError"),
    "is no Python": ("def f(:", "SyntaxError"),
    "holds a null byte": ("a = '\0'", "SyntaxError"),
    "holds half a character": ("a = '\ud800'", "UnicodeEncodeError"),
    "nests too deep": ("(" * 10**5, "raised"),
    "closes the pipe": ("import os\nos.closerange(0, 100)", "ended before"),
    "raises without a handler": ("class E(BaseException): pass\nraise E", "raised E"),
    "aborts": ("import os\nos.abort()", "killed by signal"),
    "writes where it likes": (f"open({tempfile.gettempdir()!r} + '/midfill-x', 'w')", "raised"),
    "removes files": (f"import os\nos.remove({__file__!r})", "raised"),
    "makes listening sockets": (
        "import socket\nsocket.socket().connect(('192.0.2.1', 80))",
        "raised",
    ),
}
PASSING = {
    "does nothing": "",
    "prints megabytes": (
        "import sys\nfor _ in range(50): print('x' * 10**5); sys.stderr.write('y' * 10**5)"
    ),
    "uses its folder": (
        "import os\nassert os.listdir() == []\nopen('a', 'w').write('b')\nassert open('a').read()"
    ),
    "has no environment": "import os\nassert not os.environ",
    "imports the standard library": "import math, re, hashlib, collections, decimal, statistics",
    "has threads": "import threading\nprint(threading.current_thread().name)",
}


@pytest.fixture(scope="module", params=["namespaces", "audit-hook"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    isolation: Isolation = request.param
    try:
        sandbox = Sandbox(2, LIMITS, isolation)
    except MidfillError as error:
        pytest.skip(f"this system has none: {error}")
    with sandbox:
        assert sandbox.isolation == isolation
        yield sandbox


@pytest.fixture(scope="module")
def contained() -> Iterator[Sandbox]:
    try:
        sandbox = Sandbox(1, LIMITS, "namespaces")
    except MidfillError as error:
        pytest.skip(f"this system has none: {error}")
    with sandbox:
        yield sandbox


def run(sandbox: Sandbox, program: str) -> Verdict:
    (verdict,) = sandbox.run([script(program)])
    return verdict


def script(source: str) -> Program:
    """Make a program that passes if its source runs to its end."""
    return Program(
        source=f"{source}\ndef answer():\n    return 42\n",
        entry_point="answer",
        test="def check(candidate):\n    assert candidate() == 42\n",
    )


def test_programs_that_must_fail_fail(sandbox: Sandbox) -> None:
    verdicts = sandbox.run([script(program) for program, _ in EVERYWHERE.values()])
    for (name, (_, reason)), verdict in zip(EVERYWHERE.items(), verdicts, strict=True):
        assert not verdict.passed, name
        assert reason in verdict.reason, name
    assert Path(__file__).exists()
    assert not (Path(tempfile.gettempdir()) / "midfill-x").exists()


def test_programs_without_end_fail(sandbox: Sandbox) -> None:
    with Sandbox(2, SHORT_LIMITS, sandbox.isolation) as short:
        verdicts = short.run([script(program) for program in ENDLESS])
    for reason, verdict in zip(ENDLESS.values(), verdicts, strict=True):
        assert not verdict.passed
        assert reason in verdict.reason


def test_programs_that_run_to_their_end_pass(sandbox: Sandbox) -> None:
    verdicts = sandbox.run([script(program) for program in PASSING.values()])
    assert dict(zip(PASSING, verdicts, strict=True)) == {
        name: Verdict(True, "passed") for name in PASSING
    }


def test_programs_leave_nothing_for_each_other(sandbox: Sandbox) -> None:
    write = "import builtins, math\nbuiltins.x = math.y = 1\nopen('a', 'w').write('b')"
    read = "import builtins, math, os\nassert not os.listdir()\nassert not hasattr(math, 'y')"
    assert all(verdict.passed for verdict in sandbox.run([script(write), script(read)] * 4))


def test_a_server_on_this_machine_is_out_of_reach(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5).send(b'x')"
        verdict = run(sandbox, reach)
        assert not verdict.passed
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_verdicts_come_in_the_order_of_the_programs(sandbox: Sandbox) -> None:
    sources = [f"import time\ntime.sleep({0.02 * (i % 3)})\nassert {i} % 2" for i in range(12)]
    programs = [script(source) for source in sources]
    heard: list[tuple[int, int]] = []
    verdicts = sandbox.run(programs, lambda done, total: heard.append((done, total)))
    assert [verdict.passed for verdict in verdicts] == [bool(i % 2) for i in range(12)]
    assert heard == [(done, 12) for done in range(1, 13)]
    assert sandbox.run([]) == []


def test_no_interpreter_is_started_per_program(sandbox: Sandbox) -> None:
    def workers() -> list[int]:
        return [worker._process.pid for worker in sandbox._workers]

    before = workers()
    assert all(verdict.passed for verdict in sandbox.run([script("x = 1")] * 100))
    assert workers() == before


@pytest.mark.parametrize(
    ("end", "passes"), [("time.sleep(3)", True), ("while True: time.sleep(1)", False)]
)
def test_children_end_with_their_program(contained: Sandbox, end: str, passes: bool) -> None:
    limits = LIMITS if passes else Limits(cpu_seconds=60, wall_seconds=4)
    mark = f"midfill-heartbeat-{os.getpid()}-{passes}"
    program = _ORPHAN.format(mark=mark, interpreter=os.path.realpath(sys.executable)) + end
    with Sandbox(1, limits, contained.isolation) as sandbox, ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(run, sandbox, program)
        wait_for(lambda: _running(mark))
        assert verdict.result().passed == passes
    wait_for(lambda: not _running(mark))


def test_a_child_that_outlives_its_parent_passes_no_tests(contained: Sandbox) -> None:
    # The child waits: until the kernel has ended it with its parent, it could answer the tests.
    verdict = run(contained, "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(60)")
    assert verdict == Verdict(False, "ended before its tests did")


def test_c_code_is_contained_too(contained: Sandbox) -> None:
    folder = tempfile.gettempdir().encode()
    through_libc = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.open({folder!r} + b"/midfill-y", os.O_WRONLY | os.O_CREAT, 0o600) == -1
assert libc.mount(None, b"/", None, 1 << 5, None) == -1  # to remount it writable
assert os.getpid() == 1
assert libc.setuid(0) == -1
"""
    assert run(contained, through_libc) == Verdict(True, "passed")
    assert not (Path(tempfile.gettempdir()) / "midfill-y").exists()


def test_without_namespaces_python_starts_nothing() -> None:
    starts = [
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.execv('/bin/true', ['true'])",
        "import ctypes\nctypes.CDLL(None)",
        "import socket\nsocket.socket()",
        "import os\nos.kill(os.getppid(), 9)",
        "import shutil\nshutil.rmtree('/nowhere')",
    ]
    with Sandbox(2, LIMITS, "audit-hook") as sandbox:
        for program, verdict in zip(starts, sandbox.run([script(s) for s in starts]), strict=True):
            assert verdict.reason == "raised PermissionError", program


def test_a_program_whose_worker_is_lost_fails_and_the_worker_is_replaced() -> None:
    with Sandbox(1, LIMITS, "audit-hook") as sandbox:
        worker = sandbox._workers[0]._process
        worker.kill()
        worker.wait()
        assert not run(sandbox, "x = 1").passed
        assert run(sandbox, "x = 1").passed


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(2, LIMITS) as sandbox:
        processes = [worker._process for worker in sandbox._workers]
        sandbox.run([script("open('a', 'w').write('b')")] * 3)
        assert any(tmp_path.iterdir())
    assert not any(tmp_path.iterdir())
    assert all(process.returncode is not None for process in processes)


# Leaves a process in a session of its own behind, whose command line holds a mark.
_ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv({interpreter!r}, ["python", "-c", "import time; time.sleep(60)  # {mark}"])
    os._exit(0)
"""


def _running(mark: str) -> bool:
    """Return whether there is a process with a mark in its command line."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark.encode() in line.read_bytes():
                return True
    return False
