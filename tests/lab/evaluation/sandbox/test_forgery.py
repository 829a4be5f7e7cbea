"""A program can't pass but by returning what its tests accept, whatever it does to its process.

The programs here give wrong answers and attack the verdict. Each is run with a test that a right
answer passes, so that a failure is due to the sandbox.
"""

from collections.abc import Iterator

import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.sandbox.pool import Isolation, Limits, Program, Sandbox

LIMITS = Limits(cpu_seconds=60, wall_seconds=60)
SHORT_LIMITS = Limits(cpu_seconds=4, wall_seconds=4)
TEST = """
def check(candidate):
    assert candidate(2) == 4
    assert candidate(3) == 9
    assert candidate([1]) == [1, 1]
"""
REFERENCE = "def double(x):\n    return x * x if isinstance(x, int) else x * 2\n"

# Sends every text it can find, and what the judge and the supervisor send, wherever it can.
_SEND = """
import json, os, struct

def send_everywhere(texts):
    frames = [[True, "passed"], {"passed": True, "reason": "passed"}, ["value", True]]
    packed = [json.dumps(frame).encode() for frame in frames]
    messages = [struct.pack("<I", len(data)) + data for data in packed]
    messages += [text.encode(errors="replace") for text in texts]
    for descriptor in range(64):
        for message in messages:
            try:
                os.write(descriptor, message)
            except OSError:
                break
"""
ATTACKS = {
    "walks frames": _SEND
    + """
import sys
def double(x):
    frame, texts = sys._getframe(), []
    while frame:
        for values in (frame.f_locals, frame.f_globals):
            texts += [value for value in list(values.values()) if isinstance(value, str)]
        frame = frame.f_back
    send_everywhere(texts)
""",
    "walks the heap": _SEND
    + """
import gc
def double(x):
    texts = []
    for value in gc.get_objects():
        if isinstance(value, dict):
            texts += [text for text in list(value.values()) if isinstance(text, str)]
    send_everywhere(texts[:1000])
""",
    "replaces the judge's functions": """
import sys
for module in list(sys.modules.values()):
    for name in ("judge", "write_frame", "encode", "exception_name", "_call"):
        if hasattr(module, name):
            setattr(module, name, lambda *arguments: [True, "passed"])
def double(x):
    return 0
""",
    "replaces builtins": """
import builtins
class Quiet(BaseException):
    pass
builtins.AssertionError = Quiet
builtins.isinstance = lambda *_: True
builtins.compile = builtins.exec = lambda *_: None
builtins.len = builtins.type = builtins.all = lambda *_: 1
def double(x):
    return 0
""",
    "returns what equals everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
def double(x):
    return Equal()
""",
    "returns numbers and lists that equal everything": """
class EqualNumber(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
class EqualList(list):
    def __eq__(self, other): return True
def double(x):
    return EqualList() if isinstance(x, list) else EqualNumber()
""",
    "claims to be of the right class": """
class Liar:
    __class__ = int
    def __eq__(self, other): return True
    def __reduce__(self): return (int, (4,))
    def __index__(self): return 4
    __pos__ = __int__ = __index__
def double(x):
    return Liar()
""",
    "leaves with success": "import os\ndef double(x):\n    os._exit(0)\n",
    "leaves politely": "import sys\ndef double(x):\n    sys.exit(0)\n",
    "leaves by a builtin exception": "def double(x):\n    raise GeneratorExit\n",
    "sends at exit": _SEND
    + """
import atexit
atexit.register(send_everywhere, [])
def double(x):
    raise SystemExit
""",
    "sends from a thread": _SEND
    + """
import threading
def repeat():
    while True:
        send_everywhere([])
threading.Thread(target=repeat, daemon=True).start()
def double(x):
    return 0
""",
    "sends while it is loaded": _SEND + "\nsend_everywhere([])\ndef double(x):\n    return 0\n",
    "reads the other processes": _SEND
    + """
def double(x):
    texts = []
    for process in os.listdir("/proc"):
        for name in ("mem", "cmdline", "environ"):
            texts.append(open(f"/proc/{process}/{name}", errors="replace").read(10**6))
    send_everywhere(texts)
""",
    "kills its parent": """
import os, signal
def double(x):
    os.kill(os.getppid(), signal.SIGKILL)
    return 0
""",
    "kills everybody": """
import os, signal
def double(x):
    os.kill(-1, signal.SIGKILL)
    return 0
""",
    "nests too deep": """
def double(x):
    nested = []
    for _ in range(10**5):
        nested = [nested]
    return nested
""",
    "returns without end": "import itertools\ndef double(x):\n    return itertools.count()\n",
    "returns itself": "def double(x):\n    a = []\n    a.append(a)\n    return a\n",
    "has no such function": "def triple(x):\n    return 3 * x\n",
    "sends no message": """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"\\xff" * 100)
    except OSError:
        pass
def double(x):
    return 0
""",
}

# Looks for a text, given in two parts, in the objects of its process. It never joins them itself.
_FIND_OBJECTS = """
import gc, sys
def find(first, second):
    found = []
    seen = set()
    def look(value, depth):
        if id(value) in seen or depth > 6:
            return
        seen.add(id(value))
        if isinstance(value, str) and value.partition(first)[2].startswith(second):
            found.append(value)
        elif isinstance(value, (list, tuple, set)):
            for part in list(value): look(part, depth + 1)
        elif isinstance(value, dict):
            for part in list(value.values()): look(part, depth + 1)
    frame = sys._getframe()
    while frame:
        look(dict(frame.f_locals), 0)
        look(frame.f_globals, 0)
        frame = frame.f_back
    if hasattr(gc, "get_objects"):
        try:
            for value in gc.get_objects(): look(value, 4)
        except PermissionError:
            pass
    return bool(found)
"""
# The same in the bytes of its memory, around its objects.
_FIND_BYTES = """
import ctypes, os
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
def find(first, second):
    libc, page = ctypes.CDLL(None), 1 << 16
    buffer = ctypes.create_string_buffer(page)
    first, second = first.encode(), second.encode()
    for centre in {id(object()) >> 27, id(find) >> 27, id("x" * 10**6) >> 27, id(bytearray) >> 27}:
        for at in range(centre << 27, (centre + 1) << 27, page):
            mine, there = Part(ctypes.addressof(buffer), page), Part(at, page)
            got = libc.process_vm_readv(
                os.getpid(), ctypes.byref(mine), 1, ctypes.byref(there), 1, 0
            )
            parts = buffer.raw[: max(got, 0)].split(first)
            if any(part.startswith(second) for part in parts[1:]):
                return True
    return False
"""


HANGING = "replaces the judge's functions"


@pytest.fixture(scope="module", params=["namespaces", "audit-hook"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    isolation: Isolation = request.param
    try:
        sandbox = Sandbox(1, LIMITS, isolation)
    except MidfillError as error:
        pytest.skip(f"this system has none: {error}")
    with sandbox:
        yield sandbox


def program(source: str, test: str = TEST) -> Program:
    return Program(source=source, entry_point="double", test=test, reference=REFERENCE)


def passes(sandbox: Sandbox, source: str, test: str = TEST) -> bool:
    (verdict,) = sandbox.run([program(source, test)])
    return verdict.passed


def test_the_right_answer_passes_and_a_wrong_one_fails(sandbox: Sandbox) -> None:
    assert passes(sandbox, REFERENCE)
    assert not passes(sandbox, "def double(x):\n    return 4\n")


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - {HANGING}))
def test_attacks_fail(sandbox: Sandbox, name: str) -> None:
    check_fails(sandbox, ATTACKS[name])


def test_an_attack_that_never_ends_fails(sandbox: Sandbox) -> None:
    with Sandbox(1, SHORT_LIMITS, sandbox.isolation) as short:
        check_fails(short, ATTACKS[HANGING])


def check_fails(sandbox: Sandbox, attack: str) -> None:
    assert not passes(sandbox, attack)
    assert passes(sandbox, REFERENCE), "the next program is not affected"


def test_what_equals_everything_is_not_empty_nor_true(sandbox: Sandbox) -> None:
    test = "def check(candidate):\n    assert candidate(2) in ([], '', 0, 1, True, None, 4)\n"
    assert not passes(sandbox, ATTACKS["returns what equals everything"], test)


def test_a_test_that_swallows_everything_does_not_hide_that_the_program_ended(
    sandbox: Sandbox,
) -> None:
    test = "def check(candidate):\n    try:\n        candidate(2)\n    except:\n        pass\n"
    assert not passes(sandbox, ATTACKS["leaves with success"], test)
    assert passes(sandbox, "def double(x):\n    raise ValueError\n", test)


def test_helpers_of_the_tests_come_from_the_reference(sandbox: Sandbox) -> None:
    test = "def check(candidate):\n    assert inverse(candidate(2)) == 2\n"
    helper = "def inverse(y):\n    return y / 2\n"
    tested = [
        Program(
            source=source,
            entry_point="double",
            test=test,
            reference=helper + "def double(x):\n    return 2 * x\n",
        )
        for source in (
            "def double(x):\n    return 2 * x\n",
            "def inverse(y):\n    return 2\ndef double(x):\n    return 0\n",
        )
    ]
    assert [verdict.passed for verdict in sandbox.run(tested)] == [True, False]


def test_the_tests_name_for_the_function_is_the_programs(sandbox: Sandbox) -> None:
    test = "def check(candidate):\n    assert double(2) == candidate(2) == 4\n"
    assert passes(sandbox, REFERENCE, test)
    assert not passes(sandbox, "def double(x):\n    return 5\n", test)


@pytest.mark.parametrize("search", [_FIND_OBJECTS, _FIND_BYTES], ids=["objects", "bytes"])
def test_tests_and_other_programs_are_not_in_a_programs_memory(
    sandbox: Sandbox, search: str
) -> None:
    if search is _FIND_BYTES and sandbox.isolation != "namespaces":
        pytest.skip("the audit hook refuses ctypes")
    secret, mine = "the-judge" + "-knows-this", "the-program" + "-knows-this"
    test = f"secret = {secret!r}\ndef check(candidate):\n    assert candidate(secret[:9])\n"
    look_for = f"{search}\ndef double(first):\n    return find(first, '-knows-this')\n"
    other = f"text = {secret!r}\ndef double(x):\n    return True\n"
    assert passes(sandbox, other, test)  # an earlier program and its tests hold the text
    assert not passes(sandbox, look_for, test)
    # The search does find what is there.
    test = "def check(candidate):\n    assert candidate('the-program')\n"
    assert passes(sandbox, f"mine = {mine!r}\n{look_for}", test)


def test_no_other_process_is_visible(sandbox: Sandbox) -> None:
    listed = """
import os
def double(x):
    try:
        return [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
"""
    assert passes(sandbox, listed, "def check(candidate):\n    assert candidate(2) == []\n")
    if sandbox.isolation == "namespaces":
        processes = """
import os
def double(x):
    found = []
    for process in range(2, 40000):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            continue
        found.append(process)
    return [os.getpid(), os.getppid(), found]
"""
        alone = "def check(candidate):\n    assert candidate(2) == [1, 0, []]\n"
        assert passes(sandbox, processes, alone)
        root = "import os\ndef double(x):\n    return sorted(os.listdir('/'))\n"
        bare = (
            "def check(candidate):\n"
            "    assert not {'home', 'proc', 'run', 'sys', 'tmp', 'var'} & set(candidate(2))\n"
        )
        assert passes(sandbox, root, bare)
