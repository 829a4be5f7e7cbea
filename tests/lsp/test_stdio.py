"""``midfill lsp`` on its standard input and output: how it starts and ends, and broken messages."""

import json
import subprocess
import sys

import pytest
from lsp_editor import frame
from lsprotocol import types

HEAVY = ("torch", "numba", "numpy", "tokenizers", "fastapi", "zmq", "httpx")


def run(data: bytes, *options: str) -> "subprocess.CompletedProcess[bytes]":
    """Run it on some input."""
    command = [sys.executable, "-m", "midfill", "lsp", *options]
    return subprocess.run(command, input=data, capture_output=True, timeout=120, check=False)


def request(number: int, method: str, **params: object) -> bytes:
    return frame({"jsonrpc": "2.0", "id": number, "method": method, "params": params})


INITIALIZE = request(1, "initialize", processId=None, rootUri=None, capabilities={})
GOODBYE = request(9, "shutdown") + frame({"jsonrpc": "2.0", "method": "exit"})


def answers(output: bytes) -> dict[object, dict[str, object]]:
    """Return the messages of some output, by their id."""
    found = {}
    while output:
        header, _, output = output.partition(b"\r\n\r\n")
        length = int(header.split(b"\r\n")[0].removeprefix(b"Content-Length: "))
        message, output = json.loads(output[:length]), output[length:]
        found[message.get("id")] = message
    return found


def test_it_starts_without_what_serving_takes() -> None:
    program = "import sys, midfill.lsp.stdio; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert not set(HEAVY) & set(modules.stdout.decode().split())


def test_half_a_message_ends_it_with_one_line() -> None:
    result = run(INITIALIZE + b'Content-Length: 100\r\n\r\n{"json')
    assert result.returncode == 1
    assert set(answers(result.stdout)) == {1}
    assert result.stderr.splitlines() == [
        b"midfill lsp: WARNING the input ended 94 bytes before the end of a message"
    ]


def test_a_client_that_is_gone_ends_it_without_a_word() -> None:
    result = run(INITIALIZE)
    assert (result.returncode, result.stderr) == (1, b"")


def test_a_broken_message_is_one_line_and_disturbs_no_other() -> None:
    broken = [
        b"Content-Length: 5\r\n\r\n{oops",
        b"Content-Length: 2\r\n\r\n[]",
        b"Content-Length: 2\r\n\r\n{}",
        frame({"jsonrpc": "2.0", "method": "textDocument/didOpen", "params": {}}),
        frame({"jsonrpc": "2.0", "method": "textDocument/didClose"}),
        frame({"jsonrpc": "2.0", "method": "workspace/didChangeConfiguration", "params": 3}),
        frame({"jsonrpc": "2.0", "method": "textDocument/didShowCompletion", "params": {}}),
    ]
    result = run(INITIALIZE + b"".join(broken) + GOODBYE)
    assert result.returncode == 0
    assert set(answers(result.stdout)) == {1, 9}
    lines = result.stderr.decode().splitlines()
    assert len(lines) == len(broken)
    assert all(line.startswith("midfill lsp: WARNING ") for line in lines), lines


def test_lines_that_are_no_headers_are_skipped() -> None:
    result = run(INITIALIZE + b"hello\r\n\r\n" + b"x" * 3_000_000 + b"\r\n" + GOODBYE)
    assert result.returncode == 0
    assert set(answers(result.stdout)) == {1, 9}


def test_a_request_with_bad_parameters_is_answered_with_an_error() -> None:
    document, place = {"uri": "a"}, {"line": 0, "character": 0}
    bad: list[dict[str, object]] = [
        {},
        {"textDocument": document, "position": place | {"line": -1}},
        {"textDocument": document, "position": place | {"character": "0"}},
        {"textDocument": {"uri": 3}, "position": place},
    ]
    asked = [
        request(number, "textDocument/inlineCompletion", **params)
        for number, params in enumerate(bad, 2)
    ]
    result = run(INITIALIZE + b"".join(asked) + GOODBYE)
    found = answers(result.stdout)
    for number in range(2, 2 + len(bad)):
        error = found[number]["error"]
        assert isinstance(error, dict)
        assert error["code"] == types.ErrorCodes.InvalidParams
        assert error["message"].startswith("textDocument/inlineCompletion can't be read: ")
    assert len(result.stderr.splitlines()) == len(bad)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--url", "ftp://host"), "midfill: url: expected a URL like http://127.0.0.1:8080"),
        (("--api-key", "schlüssel"), "midfill: apiKey: expected printable ASCII characters"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], line: str) -> None:
    result = run(b"", *options)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode().splitlines() == [line]


def test_a_client_that_answers_no_request_gets_answers_all_the_same() -> None:
    capabilities = {"workspace": {"configuration": True}, "window": {"workDoneProgress": True}}
    document, place = {"uri": "a", "text": "x = "}, {"line": 0, "character": 4}
    asked = [
        request(1, "initialize", processId=None, rootUri=None, capabilities=capabilities),
        frame({"jsonrpc": "2.0", "method": "initialized", "params": {}}),
        frame(
            {
                "jsonrpc": "2.0",
                "method": "textDocument/didOpen",
                "params": {"textDocument": document},
            }
        ),
        request(2, "textDocument/inlineCompletion", textDocument={"uri": "a"}, position=place),
    ]
    command = [sys.executable, "-m", "midfill", "lsp", "--url", "http://127.0.0.1:9"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"".join(asked))
        process.stdin.flush()
        found: object = None
        while found != 2:
            length = 0
            while header := process.stdout.readline().strip():
                if header.startswith(b"Content-Length: "):
                    length = int(header.removeprefix(b"Content-Length: "))
            found = json.loads(process.stdout.read(length)).get("id")
        process.stdin.close()
        told = process.stderr.readline().decode()
    assert told == (
        "midfill lsp: WARNING the client has not answered workspace/configuration within 2 s:"
        " the settings known so far are used\n"
    )
