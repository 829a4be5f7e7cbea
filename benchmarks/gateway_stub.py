"""A server without a model, to measure what stands in front of it.

Run as ``python -m benchmarks.gateway_stub``; it prints its port. It answers /v1/completions as
vLLM does, at the times of a model of its own: the first token after FIRST_SECONDS, the others
TOKEN_SECONDS apart, however many requests there are.
"""

import asyncio
import json
from contextlib import suppress

FIRST_SECONDS, TOKEN_SECONDS = 0.1, 0.01
MODEL = "qwen2.5-coder-stub"
_TOKEN = {"choices": [{"index": 0, "text": " x", "finish_reason": None}]}
_END = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            _, _, length = head.partition("content-length:")
            body = await reader.readexactly(int(length.split("\r\n")[0])) if length else b""
            path = head.split(" ")[1]
            if path == "/v1/completions":
                await _complete(json.loads(body), writer)
            elif path in ("/health", "/v1/models"):
                entry = {"id": MODEL, "owned_by": "vllm", "max_model_len": 32768}
                _send(writer, b"200 OK", {"data": [entry]})
            else:
                _send(writer, b"404 Not Found", {"error": {"message": "not here"}})
            await writer.drain()
    writer.close()


def _send(writer: asyncio.StreamWriter, status: bytes, value: object) -> None:
    data = json.dumps(value).encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % (status, len(data)) + data)


async def _complete(body: dict[str, int], writer: asyncio.StreamWriter) -> None:
    """Stream an answer of as many tokens as are asked for."""
    started = asyncio.get_running_loop().time()
    tokens = body["max_tokens"]
    writer.write(_HEAD)
    for number in range(tokens):
        due = started + FIRST_SECONDS + number * TOKEN_SECONDS
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        _event(writer, json.dumps(_TOKEN))
    usage = {"prompt_tokens": len(body["prompt"]) // 3, "completion_tokens": tokens}  # type: ignore[arg-type]
    _event(writer, json.dumps(_END))
    _event(writer, json.dumps({"choices": [], "usage": usage}))
    _event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_main())
