"""Targets: what clients, operators and other servers send."""

import base64
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request

from fuzzing.target import Target, scratch
from midfill.errors import InvalidRequestError, MidfillError
from midfill.infill.formats import FAMILIES, FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, TextSegment
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest, RequestedLayout
from midfill.infill.template import parse_template
from midfill.infill.window import WindowRule
from midfill.serving.gateway.upstream_api import UpstreamFailedError
from midfill.serving.gateway.upstream_http import read_events
from midfill.serving.server.app import DIALECTS
from midfill.serving.server.auth import KeyRing, monitor_check, tenant_check
from midfill.serving.server.bodies import decode_json
from midfill.serving.server.key_file import read_key_file
from midfill.serving.server.responses import ApiError, openai_error_body
from midfill.serving.top.history import parse_snapshot

_BODIES = [body for dialect in DIALECTS for body in dialect.bodies]
_FORMAT = FimFormat("test", *(Sentinel(f"<{n}>", i) for i, n in enumerate(("P", "S", "M"))))


def _parse_body(data: bytes) -> None:
    """A request's body, the first byte of which chooses its kind."""
    if not data:
        return
    try:
        decode_json(data[1:], _BODIES[data[0] % len(_BODIES)])
    except InvalidRequestError as error:
        json.dumps(openai_error_body(ApiError(400, str(error), param=error.param))).encode()
        raise MidfillError("refused") from None  # how it is shown, the server decides


def _body_seeds() -> list[bytes]:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    bodies: list[dict[str, object]] = [
        {"prompt": ["a"], "suffix": "b", "max_tokens": 2, "stop": ["x"], "logit_bias": {"1": 2},
         "stream": True, "stream_options": {"include_usage": True}, "midfill": {
             "window": {"before": 1}, "context": [{"text": "a", "path": "b"}], "lines": "single"}},
        {"messages": messages, "temperature": 0.5, "seed": 1, "logprobs": True},
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "a"}], "n_predict": 2},
        {"model": "m", "prompt": "a", "options": {"num_predict": 2, "stop": ["a"]}},
        {"segments": {"prefix": "a", "suffix": "b"}, "type": "view", "tokens": [1]},
    ]  # fmt: skip
    texts = [json.dumps(body).encode() for body in bodies]
    return [bytes([kind]) + text for kind in range(len(_BODIES)) for text in texts]


def _parse_template(data: bytes) -> None:
    prompt = data.decode(errors="surrogateescape")
    for format in (None, _FORMAT):
        found = parse_template(prompt, format)
        if found is not None:
            length = len(found.prefix) + len(found.suffix)
            assert length <= len(prompt), "a template has more text than its prompt"


def _template_seeds() -> list[bytes]:
    seeds = [b"<PRE> a <SUF>b <MID>", b"[SUFFIX]b[PREFIX]a", b"a"]
    for family in FAMILIES:
        prefix, suffix = family.prefix, family.suffix
        middle = family.middle or ""
        seeds.append(f"{prefix}a\nb{suffix}c{middle}".encode())
        seeds.append(f"<|repo_name|>r\n<|file_sep|>p\nt\n{suffix}c{prefix}a{middle}".encode())
    return seeds


class _Bytes:
    """Numbers and texts from an input's bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def __bool__(self) -> bool:
        return self.position < len(self._data)

    def number(self, limit: int) -> int:
        taken = self._data[self.position : self.position + 2]
        self.position += 2
        return int.from_bytes(taken, "little") % limit

    def text(self, limit: int) -> str:
        length = self.number(limit)
        taken = self._data[self.position : self.position + length]
        self.position += length
        return bytes(byte & 0x7F for byte in taken).decode("ascii")


def _plan_session(data: bytes) -> None:
    """Two tenants' editing sessions, whose texts have no character in common."""
    numbers = _Bytes(data)
    rule = WindowRule(1 + numbers.number(200), numbers.number(200)) if numbers.number(2) else None
    options = PlannerOptions(window=rule, max_document_bytes=20_000, snippet_characters=50)
    planner = Planner(_FORMAT if numbers.number(4) else None, options)
    texts = dict.fromkeys(_SCRIPTS, "")
    carets = dict.fromkeys(_SCRIPTS, 0)
    while numbers and numbers.position < 600:
        tenant = ("", "a")[numbers.number(2)]
        text, caret = texts[tenant], carets[tenant]
        kind = numbers.number(6)
        if kind == 0:
            caret = numbers.number(len(text) + 1)
        elif kind == 1:
            start = max(0, caret - numbers.number(40))
            text, caret = text[:start] + text[caret:], start
        elif kind == 2:
            text += numbers.text(20).translate(_SCRIPTS[tenant])
        else:
            new = numbers.text(20).translate(_SCRIPTS[tenant]) * (1 + numbers.number(30))
            text, caret = text[:caret] + new + text[caret:], caret + len(new)
        texts[tenant], carets[tenant] = text, caret
        request = InfillRequest(
            prefix=text[:caret],
            suffix=text[caret:],
            tenant=tenant,
            layout=_LAYOUTS[numbers.number(len(_LAYOUTS))],
        )
        layout = planner.plan_and_record(request)
        _check_layout(layout, request)
        if layout.document is not None and numbers.number(2):
            expected = planner.expected_layout(layout.document)
            if expected is not None:
                planner.record_computed(expected)


_LAYOUTS: tuple[RequestedLayout, ...] = ("auto", "auto", "psm", "spm", "efim")
_SCRIPTS: dict[str, dict[int, str]] = {"": {}, "a": {n: chr(0x4E00 + n) for n in range(0x80)}}
_FOREIGN = re.compile("[\u4e00-\u4eff]")
_NEAR = 50  # characters


def _check_layout(layout: PromptLayout, request: InfillRequest) -> None:
    """Next to the caret is what was sent, and nothing anywhere is another tenant's."""
    before = layout.planned_prefix[-_NEAR:]
    assert request.prefix.endswith(before), "another text before the caret"
    if layout.layout != "prefix-only":
        after = layout.planned_suffix.removeprefix(layout.line_break)[:_NEAR]
        assert request.suffix.startswith(after), "another text after the caret"
    assert 0 <= layout.cut <= len(layout.planned_prefix)
    for segment in layout.segments:
        if isinstance(segment, TextSegment):
            assert segment.text, "an empty segment"
            foreign = len(_FOREIGN.findall(segment.text))
            assert foreign == (len(segment.text) if request.tenant else 0), "another tenant's text"


def _parse_key_file(data: bytes) -> None:
    path = scratch() / "keys"
    path.write_bytes(data)
    found = read_key_file(path)
    for key in found.keys:
        assert key.name
        assert len(key.digest) == 32


_DIGEST = b"2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"
_KEYS = KeyRing(["secret", "à"])


def _check_authorization(data: bytes) -> None:
    """An Authorization header: only the keys themselves let anyone in."""
    headers = [(b"authorization", data)]
    request = Request({"type": "http", "method": "GET", "headers": headers})
    for check in (tenant_check(_KEYS), monitor_check(_KEYS)):
        try:
            _run(check(request))
        except ApiError as error:
            if error.status != 401:
                raise
        else:
            sent = data.partition(b" ")[2].strip(b" \t")
            if data.lower().startswith(b"basic"):
                sent = base64.b64decode(sent).partition(b":")[2]
            assert sent in (b"secret", "à".encode()), "let in"


def _run(awaitable: Any) -> None:
    """Run a coroutine that waits for nothing; an event loop would take longer than the check."""
    try:
        awaitable.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


def _read_events(data: bytes) -> None:
    """An upstream's stream of events, in two pieces that the first byte cuts."""

    async def pieces() -> AsyncIterator[bytes]:
        at = data[0] if data else 0
        yield data[1 : 1 + at]
        yield data[1 + at :]

    async def read() -> None:
        async for event in read_events(pieces()):
            assert isinstance(event, dict)

    try:
        _run(read())
    except UpstreamFailedError as error:
        raise MidfillError(str(error)) from None


def _parse_metrics(data: bytes) -> None:
    parse_snapshot(data.decode("utf-8", "replace"), 0.0)


_JSON_WORDS = (
    b"null", b"true", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"9" * 25, b"\\ud800",
    b"\\u0000", b"[" * 100, b'{"a":' * 50, b"1.5",
)  # fmt: skip


def _one(seed: bytes) -> Sequence[bytes]:
    return [seed]


TARGETS = {
    "bodies": Target(
        _parse_body, _body_seeds, 1024, _JSON_WORDS
    ),
    "template": Target(
        _parse_template, _template_seeds, 512,
        tuple(text.encode() for family in FAMILIES for text in (family.prefix, family.suffix)),
    ),
    "planner": Target(
        _plan_session,
        lambda: [bytes(range(256)) * 2, b"\x01\0\x20\0\x20\0\x01\0" + b"\x28\0abc\n    def\n" * 30],
        700,
        (b"\n", b"    ", "\U0001f642".encode(), b"\r\n"),
    ),
    "key-file": Target(
        _parse_key_file,
        lambda: [
            b"# team\nalice:sha256:" + _DIGEST + b"\nalice:limits:requests=60 tokens=1 running=4\n"
            b"bob:sha256:" + _DIGEST + b"\nbob:monitor\n*:limits:running=2\n"
        ],
        512,
        (b":sha256:", b":limits:", b":monitor", b"*", b"\xff", b"\x85", b"\xe2\x80\xa8"),
    ),
    "authorization": Target(
        _check_authorization,
        lambda: [b"Bearer secret", b"Basic " + base64.b64encode(b"a:secret"), b"bearer \xc3\xa0"],
        128,
    ),
    "events": Target(
        _read_events,
        lambda: [
            b'\x09data: {"choices": [{"text": "a"}]}\n\n: ping\nevent: x\ndata: [DONE]\n',
            b'\0error: {"a": 1}',
        ],
        512,
        _JSON_WORDS,
    ),
    "metrics": Target(
        _parse_metrics,
        lambda: [
            b"# TYPE midfill:steps_total counter\n"
            b'midfill:steps_total{model_name="a",tenant="b"} 1.0\n'
            b'midfill:time_to_first_token_seconds_bucket{le="0.1",tenant=""} 3\n'
        ],
        512,
        (b"midfill:", b'le="', b"+Inf", b"NaN", b"\\", b'"'),
    ),
}  # fmt: skip
