"""No request holds up the event loop, whatever it asks and however large its body is.

A watchdog on the loop counts the processor time of this process between two of its turns, so other
programs on the machine don't count. What runs beside the loop may take long; it counts only where
it keeps the loop from its turn, as one call of C code does that doesn't let go of the interpreter.
"""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
from starlette.types import ASGIApp
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.frontend.chat import ChatTemplate
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.methods.resolver import AllowedMethods
from midfill.models.checkpoints.opening import open_model
from midfill.serving.server.app import DIALECTS, create_app
from midfill.serving.server.batch.routes import batch_dialect
from midfill.serving.server.batch.store import BatchStore
from midfill.serving.server.batch.worker import BatchWorker
from midfill.serving.server.bodies import MAX_ESCAPES, MAX_VALUES
from midfill.serving.server.service import ModelService
from midfill.system.process import freeze_objects

LIMIT = 16 << 20  # of a body, by default
SPACE = LIMIT - 1000  # for text in one
MAX_STALL_SECONDS = 0.15  # of processor time: 0.1 is promised, on slow machines it may be more
TRIES = 3  # other programs slow this one down, too
CONTEXT = 65_536
TEMPLATE = "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"
LETTERS = "a b" * (SPACE // 3)
STORES: list[BatchStore] = []
BOUNDARY = b"--form\r\n"
FILE = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelService]:
    """A service without an engine; its context lets texts of half a million characters through."""
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)
    checkpoint = open_model(folder)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint, None), CONTEXT)
    checkpoint.tokenizer.prepare()
    prompts._chat = ChatTemplate(TEMPLATE, checkpoint.tokenizer, {})
    engine = EngineClient(folder, ModelOptions())
    methods = AllowedMethods(("any",), "none")
    service = ModelService(
        "tiny", engine, checkpoint.tokenizer, prompts, LIMIT, check_method=methods.check
    )
    STORES[:] = [BatchStore(tmp_path_factory.mktemp("batches"), 2 * LIMIT, 100)]
    freeze_objects()  # as a server does
    yield service
    service.close()
    gc.unfreeze()
    freeze_objects()  # but for what this module has left


async def watch(stalls: list[float]) -> None:
    """Note the processor time between two turns of the loop, for ever."""
    while True:
        before = time.process_time()
        await asyncio.sleep(0.001)
        stalls.append(time.process_time() - before)


def app_of(service: ModelService) -> ASGIApp:
    """Return the application with all endpoints that take a body."""
    worker = BatchWorker(STORES[0], service, asyncio.Event(), 1)  # type: ignore[arg-type]
    return create_app(service, dialects=(*DIALECTS, batch_dialect(worker)))


def longest_stall(service: ModelService, path: str, body: bytes) -> tuple[float, int]:
    """Return the longest stall in seconds while a request is answered, and its status."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    async def ask() -> tuple[float, int]:
        transport = httpx.ASGITransport(app=app_of(service))
        form = "multipart/form-data; boundary=form"
        headers = {"content-type": form if path == "/v1/files" else "application/json"}
        stalls: list[float] = []
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.post(path, content=b"{", headers=headers)  # routes are made
            watchdog = asyncio.create_task(watch(stalls))
            answer = await client.post(path, content=pieces(), headers=headers, timeout=120)
            await asyncio.sleep(0.005)
            watchdog.cancel()
        return max(stalls), answer.status_code

    return asyncio.run(ask())


def of_json(**fields: object) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def numbers(field: str, count: int, rest: str = "") -> bytes:
    return f'{{"{field}":[{"123," * (count - 1)}1]{rest}}}'.encode()


MESSAGE = {"role": "user", "content": "a"}
WORDS = "ab c " * 60_000
LINES = "ab = c\n" * (4_000_000 // 7)
MANY = SPACE // 4

BODIES: list[tuple[str, Callable[[], bytes]]] = [
    ("/tokenize", lambda: of_json(content="ab " * (1 << 18), with_pieces=True)),
    ("/tokenize", lambda: of_json(content="a" * (1 << 20))),
    ("/tokenize", lambda: of_json(content="é" * (1 << 16), with_pieces=True)),
    ("/tokenize", lambda: of_json(content=LETTERS, with_pieces=True)),
    ("/detokenize", lambda: numbers("tokens", MAX_VALUES)),
    ("/detokenize", lambda: numbers("tokens", MANY)),
    ("/completion", lambda: of_json(prompt="a", logit_bias={"b" * SPACE: 1})),
    ("/completion", lambda: of_json(prompt="a", logit_bias=[["é" * 8, 1]] * 1024)),
    ("/completion", lambda: of_json(prompt="a", samplers="k" * SPACE)),
    ("/completion", lambda: numbers("prompt", MAX_VALUES)),
    ("/completions", lambda: of_json(prompt=WORDS)),
    ("/infill", lambda: of_json(input_prefix=LINES, input_suffix=LINES)),
    (
        "/infill",
        lambda: of_json(input_prefix="a", input_suffix="", input_extra=[{"text": LETTERS}]),
    ),
    (
        "/infill",
        lambda: of_json(input_prefix="", input_suffix="", input_extra=[{"text": ""}] * 100_000),
    ),
    ("/v1/completions", lambda: of_json(prompt="a" * SPACE)),
    ("/v1/completions", lambda: of_json(prompt=WORDS)),
    ("/v1/completions", lambda: of_json(prompt=[WORDS] * 20)),
    ("/v1/completions", lambda: of_json(prompt=LINES, suffix=LINES)),
    ("/v1/completions", lambda: of_json(prompt="a", stop=["b"] * (MAX_VALUES - 9))),
    ("/v1/completions", lambda: of_json(prompt="a", stop="b" * SPACE)),
    ("/v1/completions", lambda: of_json(prompt="a", model="b" * SPACE)),
    (
        "/v1/completions",
        lambda: of_json(prompt="a", logit_bias={str(i): 1 for i in range(MAX_VALUES)}),
    ),
    ("/v1/completions", lambda: numbers("prompt", MANY, ',"x":NaN')),
    ("/v1/completions", lambda: numbers("prompt", MAX_VALUES - 9, ',"x":NaN')),
    ("/v1/completions", lambda: of_json(prompt="a" * SPACE).replace(b"a}", b'a","x":NaN}')),
    ("/v1/completions", lambda: b'{"prompt":"' + b"\xff" * SPACE + b'"}'),
    ("/v1/completions", lambda: b'{"prompt":"' + b"\\u00e9" * (SPACE // 6) + b'"}'),
    ("/v1/completions", lambda: b'{"prompt":"' + b"\\u00e9" * (MAX_ESCAPES // 4) + b'"}'),
    ("/v1/completions", lambda: b'{"prompt":"' + b"\\n" * MAX_ESCAPES + b'"}'),
    ("/v1/completions", lambda: of_json(prompt="a", midfill={"b" * SPACE: 1})),
    ("/v1/completions", lambda: of_json(prompt="a", midfill={"layout": "b" * SPACE})),
    (
        "/v1/completions",
        lambda: of_json(prompt="a", midfill={"layout": "\n" * (MAX_ESCAPES - 99)}),
    ),
    ("/v1/completions", lambda: of_json(prompt="a", midfill={"method": "\0" * (MAX_ESCAPES // 4)})),
    ("/v1/completions", lambda: of_json(prompt="a", midfill={"method": "a+" * (SPACE // 2)})),
    ("/v1/completions", lambda: of_json(prompt=",\\" * (SPACE // 4))),
    ("/v1/completions", lambda: b'"' * LIMIT),
    (
        "/v1/completions",
        lambda: of_json(segments={"prefix": LINES, "suffix": LINES, "git_url": "a/" * 99}),
    ),
    ("/v1/chat/completions", lambda: of_json(messages=[{"role": "a" * SPACE, "content": "a"}])),
    ("/v1/chat/completions", lambda: of_json(messages=[{"role": WORDS, "content": "a"}])),
    (
        "/v1/chat/completions",
        lambda: of_json(messages=[{"role": "a", "content": "<|im_" * 60_000}]),
    ),
    ("/v1/chat/completions", lambda: of_json(messages=[MESSAGE] * 100_000)),
    ("/chat/completions", lambda: of_json(messages=[{"role": "a", "content": "a" * SPACE}])),
    ("/beta/completions", lambda: of_json(prompt=LINES, suffix=LINES)),
    ("/beta/v1/completions", lambda: of_json(prompt=LINES, suffix="b" * 4_000_000)),
    ("/v1/fim/completions", lambda: of_json(prompt=LINES, suffix=LINES)),
    ("/v1/events", lambda: of_json(type="view", completion_id="a" * SPACE, choice_index=1)),
    ("/api/generate", lambda: of_json(model="tiny", prompt=WORDS, system=WORDS)),
    ("/api/generate", lambda: numbers("context", MANY, ',"model":"tiny","prompt":"a"')),
    ("/api/chat", lambda: of_json(model="tiny", messages=[MESSAGE] * 100_000)),
    ("/api/show", lambda: of_json(model="a" * SPACE)),
    ("/v1/batches", lambda: of_json(input_file_id="a" * SPACE, endpoint="/v1/completions")),
    ("/v1/files", lambda: BOUNDARY + FILE + b"a" * (SPACE - 99)),
    ("/v1/files", lambda: BOUNDARY + FILE + b"\r\n--for" * (SPACE // 7 - 99)),
    ("/v1/files", lambda: (BOUNDARY + FILE[:40] + b"\r\n\r\n\r\n") * (SPACE // 55)),
]


def test_all_that_take_a_body_are_here(service: ModelService) -> None:
    async def describe() -> httpx.Response:
        transport = httpx.ASGITransport(app=app_of(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/openapi.json")

    described = asyncio.run(describe()).json()["paths"]
    taking = {
        path for path, methods in described.items() if "requestBody" in methods.get("post", {})
    }
    assert taking == {path for path, _ in BODIES}


@pytest.mark.parametrize(("path", "make_body"), BODIES, ids=[path for path, _ in BODIES])
def test_no_request_holds_up_the_others(
    service: ModelService, path: str, make_body: Callable[[], bytes]
) -> None:
    body = make_body()
    assert len(body) <= LIMIT
    stalls = []
    while len(stalls) < TRIES and min(stalls, default=MAX_STALL_SECONDS) >= MAX_STALL_SECONDS:
        stall, status = longest_stall(service, path, body)
        stalls.append(stall)
    assert min(stalls) < MAX_STALL_SECONDS, (status, stalls)
