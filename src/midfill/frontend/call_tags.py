"""Calls of functions between two tags, in the content of an answer.

Models of most families write a call in one of two forms (Hermes, Qwen2.5, Qwen3, SmolLM3 and
Granite 4 the first, Qwen3-Coder and Qwen3.5 the second):

    <tool_call>
    {"name": "NAME", "arguments": {"city": "Ulm", "days": 2}}
    </tool_call>

    <tool_call>
    <function=NAME>
    <parameter=city>
    Ulm
    </parameter>
    ...
    </function>
    </tool_call>

In the second, a value is text; what it is besides, the function's JSON Schema says. Blanks around
calls are layout and left out. What stands between the tags and is no call stays content, with its
tags. A call whose closing tag is missing at the end of the answer is one if it is complete.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from midfill.frontend.channels import AnswerParser, Event, Marker, Piece, trailing_overlap

OPENING, CLOSING = "<tool_call>", "</tool_call>"
TAGS = {OPENING: Marker.CALL, CLOSING: Marker.CALL_END}
"""The tags as markers, where their tokens have no text."""

_TEXTS = {marker: text for text, marker in TAGS.items()}
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class CallParser:
    """Finds calls in the content that another parser returns; see ``AnswerParser``.

    Args:
        inner: tells reasoning from content; None where all is content.
        tools: of the request, as the chat template sees them; their schemas give values types.
    """

    def __init__(self, inner: AnswerParser | None, tools: Sequence[Mapping[str, Any]]) -> None:
        self._inner = inner
        self._schemas = _schemas(tools)
        self._held = ""  # content that isn't decided, or all of a call so far
        self._blanks = ""  # before a call, if it is one
        self._calling = False
        self._called = False  # whether a call is what was last written
        self.in_content: bool | None = False

    def push(self, event: Event) -> tuple[Piece, ...]:
        """Take the next part of the answer; return what it adds."""
        if isinstance(event, Marker) and event in _TEXTS:
            event = _TEXTS[event]
        if self._inner is not None:
            pieces = self._inner.push(event)
        else:
            pieces = (Piece("content", event),) if isinstance(event, str) else ()
        return self._sorted(pieces)

    def finish(self) -> tuple[Piece, ...]:
        """Return what was held back, once the answer has ended."""
        pieces = self._sorted(() if self._inner is None else self._inner.finish())
        held, self._held = self._held, ""
        if not self._calling:
            rest = self._content(held)
        elif (call := self._call(held)) is not None:
            rest = call
        else:
            rest = self._content(self._blanks + OPENING + held)
        self.in_content = bool(rest) and rest[-1].kind == "content"
        return (*pieces, *rest)

    def _sorted(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._read(piece.text) if piece.kind == "content" else (piece,)
        if self._inner is not None and self._inner.in_content is not True:
            self.in_content = self._inner.in_content
        else:
            self.in_content = False if self._calling else None if self._held else True
        return tuple(found)

    def _read(self, text: str) -> list[Piece]:
        """Divide content into text and calls."""
        found: list[Piece] = []
        self._held += text
        while True:
            tag = CLOSING if self._calling else OPENING
            before, met, after = self._held.partition(tag)
            if not met:
                break
            if not self._calling:
                shown = before.rstrip()
                found += self._content(shown)
                self._blanks = before[len(shown) :]
            elif (call := self._call(before)) is not None:
                found += call
            else:
                found += self._content(self._blanks + OPENING + before + CLOSING)
            self._held, self._calling = after, not self._calling
        if not self._calling:  # blanks may be layout, and the end may be a tag's beginning
            shown = self._held[: len(self._held) - trailing_overlap(self._held, OPENING)].rstrip()
            if shown:
                self._held = self._held[len(shown) :]
                found += self._content(shown)
        return found

    def _content(self, text: str) -> tuple[Piece, ...]:
        text = text.lstrip() if self._called else text
        if not text:
            return ()
        self._called = False
        return (Piece("content", text),)

    def _call(self, text: str) -> tuple[Piece, ...] | None:
        """Return a call's pieces; None if the text is none."""
        found = _parsed_json(text) or _parsed_tags(text, self._schemas)
        if found is None:
            return None
        name, arguments = found
        self._called = True
        return (Piece("call", "", name), Piece("call", arguments))


def _parsed_json(text: str) -> tuple[str, str] | None:
    with suppress(ValueError, RecursionError):
        call = json.loads(text)
        name = call.get("name") if isinstance(call, dict) else None
        if isinstance(name, str) and name:
            arguments = call.get("arguments", call.get("parameters", {}))
            return name, arguments if isinstance(arguments, str) else _json(arguments)
    return None


def _parsed_tags(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    match = _FUNCTION.fullmatch(text.strip())
    if match is None:
        return None
    name, body = match.groups()
    schema = schemas.get(name, {})
    values = {key: _typed(value, schema.get(key)) for key, value in _PARAMETER.findall(body)}
    return name, _json(values)


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of each function's parameters, by its name."""
    functions = [tool["function"] for tool in tools]
    found = {}
    for function in functions:
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties")
        found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found


def _typed(value: str, schema: Any) -> Any:
    """Return a value as its schema has it: JSON, unless it may be a text."""
    kinds = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    return {"true": True, "false": False}.get(value.strip().lower(), value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
