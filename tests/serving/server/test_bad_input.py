"""Bad input: a 4xx in OpenAI's shape that names the field; no other request is affected."""

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]

# (field the error names, the fields that are wrong); "prompt" is "a" where it isn't given.
BAD_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": ["a", [1]]}),
    ("prompt", {"prompt": [1, -1]}),
    ("prompt", {"prompt": [1, 320]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt[0]", {"prompt": [True]}),
    ("prompt[1]", {"prompt": [1, 1.5]}),
    ("prompt", {"prompt": "ab" * 1000}),
    ("prompt", {"prompt": "x" * 3_000_000}),
    ("prompt", {"prompt": ["a"] * 5000}),
    (
        "prompt",
        {"prompt": "ab" * 200, "suffix": "cd" * 200, "midfill": {"window": "as-sent"}},
    ),
    ("suffix", {"suffix": 5}),
    ("suffix", {"prompt": [1, 2], "suffix": "a"}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("n", {"n": 0}),
    ("n", {"n": -3}),
    ("n", {"n": 10**6}),
    ("n", {"n": True}),
    ("n", {"n": 128, "prompt": ["a"] * 100}),
    ("best_of", {"best_of": 0}),
    ("best_of", {"best_of": 2, "n": 3}),
    ("best_of", {"best_of": 3, "n": 2, "stream": True}),
    ("best_of", {"best_of": 500}),
    ("best_of", {"best_of": "2"}),
    ("temperature", {"temperature": -0.5}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": float("-inf")}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_p", {"top_p": float("nan")}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 2}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("presence_penalty", {"presence_penalty": 9}),
    ("frequency_penalty", {"frequency_penalty": -9}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("seed", {"seed": 2**70}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": [""]}),
    ("stop[1]", {"stop": ["a", 5]}),
    ("stop", {"stop": [str(i) for i in range(10_000)]}),
    ("stop", {"stop": "x" * 1_000_000}),
    ("stop_token_ids", {"stop_token_ids": [320]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids[0]", {"stop_token_ids": ["a"]}),
    ("logit_bias", {"logit_bias": {"320": 1}}),
    ("logit_bias", {"logit_bias": {"word": 1}}),
    ("logit_bias", {"logit_bias": {"1": 1000}}),
    ("logit_bias[...]", {"logit_bias": {"1": "x"}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": 5}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": "x"}}),
    ("echo", {"echo": "x"}),
    ("echo", {"echo": True, "logprobs": 1, "suffix": "b"}),
    ("echo", {"echo": True, "max_tokens": 0, "suffix": "b"}),
    ("echo", {"echo": True, "logprobs": 1, "prompt": "<PRE> a <SUF>b <MID>"}),
    ("logprobs", {"echo": True, "logprobs": 21}),
    ("model", {"model": 5}),
    ("midfill", {"midfill": 5}),
    ("midfill.layout", {"suffix": "b", "midfill": {"layout": "zigzag"}}),
    ("midfill.layout", {"midfill": {"layout": "psm"}}),
    ("midfill.layuot", {"suffix": "b", "midfill": {"layuot": "psm"}}),
    ("midfill.document", {"suffix": "b", "midfill": {"document": 7}}),
    ("suffix", {"suffix": "b", "midfill": {"layout": "verbatim"}}),
    ("midfill.healing", {"suffix": "b", "midfill": {"healing": "no"}}),
    ("midfill.empty_threshold", {"suffix": "b", "midfill": {"empty_threshold": -0.1}}),
    ("midfill.empty_threshold", {"suffix": "b", "midfill": {"empty_threshold": 15}}),
    ("midfill.empty_threshold", {"suffix": "b", "midfill": {"empty_threshold": "0.1"}}),
    ("midfill.empty_threshold", {"suffix": "b", "midfill": {"empty_threshold": True}}),
    ("midfill.empty_threshold", {"midfill": {"empty_threshold": 0.0}}),
    ("midfill.empty_threshold", {"prompt": [1], "midfill": {"empty_threshold": 0.5}}),
    ("midfill.lines", {"suffix": "b", "midfill": {"lines": "two"}}),
    ("midfill.brackets", {"suffix": "b", "midfill": {"brackets": "open"}}),
    ("midfill.trim", {"suffix": "b", "midfill": {"trim": 1}}),
    ("midfill.path", {"suffix": "b", "midfill": {"path": 5}}),
    ("midfill.path", {"suffix": "b", "midfill": {"path": "x" * 1_000_000}}),
    ("midfill.path", {"midfill": {"path": "a.py"}}),
    ("midfill.repository", {"midfill": {"repository": "r"}}),
    ("midfill.context", {"suffix": "b", "midfill": {"context": "x"}}),
    ("midfill.context[0].text", {"suffix": "b", "midfill": {"context": [{"path": "a"}]}}),
    ("midfill.context[1]", {"suffix": "b", "midfill": {"context": [{"text": "a"}, 5]}}),
    ("midfill.context", {"midfill": {"context": [{"text": "a"}]}}),
    ("midfill.context", {"prompt": [1], "midfill": {"context": [{"text": "a"}]}}),
    ("midfill.context", {"suffix": "b", "midfill": {"context": [{"text": "ab" * 300}]}}),
    ("midfill.window", {"suffix": "b", "midfill": {"window": "narrow"}}),
    ("midfill.window", {"suffix": "b", "midfill": {"window": 1200}}),
    ("midfill.window.lines", {"suffix": "b", "midfill": {"window": {"lines": 5}}}),
    ("midfill.window.before", {"suffix": "b", "midfill": {"window": {"before": 0}}}),
    ("midfill.window.before", {"suffix": "b", "midfill": {"window": {"before": "1"}}}),
    ("midfill.window.after", {"suffix": "b", "midfill": {"window": {"after": -1}}}),
    ("midfill.window.after", {"suffix": "b", "midfill": {"window": {"after": 1.5}}}),
    ("midfill.context", {"suffix": "b", "midfill": {"context": [{"text": "x" * 1_000_000}]}}),
    ("midfill.context", {"suffix": "b", "midfill": {"context": [{"text": ""}] * 257}}),
    ("input_extra", {"suffix": "b", "input_extra": 5}),
    ("input_extra[0].text", {"suffix": "b", "input_extra": [{"filename": "a"}]}),
    ("input_extra", {"suffix": "b", "input_extra": [{"text": "ab" * 300}]}),
    ("input_extra", {"input_extra": [{"text": "a"}]}),
]

BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"content": "hi"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
    ),
    ("messages", {"messages": [{"role": "user", "content": "ab" * 1000}]}),
    ("suffix", {"suffix": "b"}),
    ("midfill.layout", {"midfill": {"layout": "psm"}}),
    ("midfill.method", {"midfill": {"method": "cake"}}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    (
        "messages[0].tool_calls[0].function",
        {"messages": [{"role": "a", "tool_calls": [{"id": "1"}]}]},
    ),
    ("functions", {"functions": [{"name": "f"}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 0}),
    ("n", {"n": 0}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
]

# (what the error names, the bytes)
BAD_BYTES: list[tuple[str | None, bytes]] = [
    (None, b""),
    (None, b"  \n"),
    (None, b"{"),
    (None, b"[]"),
    (None, b"null"),
    (None, b"5"),
    (None, b"\xff\xfe{\x00}\x00"),
    (None, b'\xef\xbb\xbf{"prompt": "a"}'),
    (None, b'{"prompt": "a"} x'),
    (None, b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    (None, b'{"x":' * 100_000 + b"1" + b"}" * 100_000),
    ("prompt", b"{}"),
    ("prompt", b'{"prompt": "a\xff"}'),
    ("prompt", b'{"prompt": "\xed\xa0\x80"}'),
    ("prompt", b'{"prompt": "\\ud83d"}'),
    ("suffix", b'{"prompt": "a", "suffix": "\\udc00 b"}'),
    ("stop[0]", b'{"prompt": "a", "stop": ["\\ud83d"]}'),
    ("midfill.document", b'{"prompt": "a", "suffix": "", "midfill": {"document": "\\ud83d"}}'),
    (None, b'{"prompt": "a", "\\ud83d": 1}'),
    ("midfill", b'{"prompt": "a", "suffix": "", "midfill": {"\\ud83d": 1}}'),
    ("temperature", b'{"prompt": "a", "temperature": NaN}'),
    ("temperature", b'{"prompt": "a", "temperature": -Infinity}'),
    ("temperature", b'{"prompt": "a", "temperature": 1e999}'),
    ("max_tokens", b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}"),
]


def check_error(response: httpx.Response, param: str | None, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert param.partition("[")[0].rpartition(".")[2] in error["message"]


def send(server: RunningServer, path: str, content: bytes) -> httpx.Response:
    return server.post(path, content=content, headers=JSON)


@pytest.mark.parametrize(("param", "fields"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_field_of_a_completion(
    server: RunningServer, param: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": "a"} | fields
    check_error(send(server, COMPLETIONS, json.dumps(body).encode()), param)


@pytest.mark.parametrize(("param", "fields"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_field_of_a_chat(server: RunningServer, param: str, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES} | fields
    check_error(send(server, CHAT, json.dumps(body).encode()), param)


@pytest.mark.parametrize(("param", "content"), BAD_BYTES, ids=lambda value: str(value)[:40])
def test_a_body_that_is_not_json(server: RunningServer, param: str | None, content: bytes) -> None:
    check_error(send(server, COMPLETIONS, content), param)


def test_long_input_is_shortened_in_messages(server: RunningServer) -> None:
    for fields in ({"x" * 10**6: 1}, {"layout": "x" * 10**6}):
        response = server.post(COMPLETIONS, {"prompt": "a", "suffix": "", "midfill": fields})
        assert response.status_code == 400
        assert len(response.content) < 2000


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_model(server: RunningServer, path: str) -> None:
    response = server.post(path, {"model": "gpt-9", "prompt": "a", "messages": MESSAGES})
    check_error(response, "model", 404)
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_prompt_longer_than_the_context(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "ab" * 1000})
    check_error(response, "prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "application/x-www-form-urlencoded"},
        JSON | {"content-encoding": "gzip"},
    ],
)
def test_a_body_that_is_not_json_by_its_headers(
    server: RunningServer, headers: dict[str, str]
) -> None:
    content = gzip.compress(b'{"prompt": "a"}')
    check_error(server.post(COMPLETIONS, content=content, headers=headers), None, 415)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", COMPLETIONS, 405), ("DELETE", "/health", 405), ("GET", "/v2", 404)],
)
def test_unknown_paths_and_methods(
    server: RunningServer, method: str, path: str, status: int
) -> None:
    check_error(server.client.request(method, server.url + path), None, status)


@pytest.mark.parametrize("chunked", [False, True])
def test_100_megabytes_are_refused_and_never_held(server: RunningServer, chunked: bool) -> None:
    megabyte = b" " * 2**20

    def body() -> Iterator[bytes]:
        for _ in range(100):
            yield megabyte

    before = peak_memory(server.process.pid)
    headers = JSON if chunked else JSON | {"content-length": str(100 * 2**20)}
    check_error(server.post(COMPLETIONS, content=body(), headers=headers), None, 413)
    assert peak_memory(server.process.pid) - before < 60 * 2**20


def test_a_declared_length_is_refused_before_the_body_arrives(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for length in ("100000000", "9" * 18, "9" * 30):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
                f"Content-Length: {length}\r\n\r\n".encode()
            )
            status = connection.recv(4096).split()[1]
            assert status in (b"413", b"400")


def test_a_client_that_disconnects_within_its_body_does_no_harm(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
            'Content-Length: 1000\r\n\r\n{"prompt": '.encode()
        )
    assert server.get("/health").status_code == 200


def test_many_bad_requests_do_not_affect_other_clients(server: RunningServer) -> None:
    body = {"prompt": "def storm(", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def stream() -> str:
        text = ""
        with httpx.stream(
            "POST", server.url + COMPLETIONS, json={**body, "stream": True}, timeout=60
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    quiet = stream()
    in_storm: list[str] = []
    over = threading.Event()

    def keep_streaming() -> None:
        while not (over.is_set() and in_storm):
            in_storm.append(stream())

    other = threading.Thread(target=keep_streaming)
    other.start()
    try:
        with httpx.Client(base_url=server.url, headers=JSON, timeout=60) as client:
            for _, fields in BAD_COMPLETIONS:
                content = json.dumps({"prompt": "a"} | fields).encode()
                assert client.post(COMPLETIONS, content=content).status_code == 400
            for _, content in BAD_BYTES:
                assert client.post(COMPLETIONS, content=content).status_code == 400
            for _, fields in BAD_CHATS:
                response = client.post(CHAT, json={"messages": MESSAGES} | fields)
                assert response.status_code == 400
    finally:
        over.set()
        other.join()
    assert in_storm
    assert set(in_storm) == {quiet}


def peak_memory(process_id: int) -> int:
    """Return the peak memory of a process in bytes."""
    with open(f"/proc/{process_id}/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
