"""Tags of calls: what of an answer's content calls a function."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from midfill.frontend.call_tags import CallParser
from midfill.frontend.channels import Call, ChannelReader, Marker

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "where": {"type": "object"},
                "now": {"type": "boolean"},
            },
        },
    },
}
JSON = '{"name": "weather", "arguments": {"city": "Ulm"}}'
ULM = Call("weather", '{"city": "Ulm"}')


def read(*events: str | Marker) -> tuple[str, tuple[Call, ...]]:
    """Return an answer's content and its calls."""
    reader = ChannelReader({}, CallParser(None, [WEATHER]))
    content = "".join(map(reader.read, events)) + reader.finish()
    reasoning, calls = reader.take()
    assert not reasoning
    return content, Call.join(calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hi.", "Hi.", ()),
        (f"<tool_call>\n{JSON}\n</tool_call>", "", (ULM,)),
        (f"Let me see. \n<tool_call>{JSON}</tool_call>\n", "Let me see.", (ULM,)),
        (f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", "", (ULM, ULM)),
        (f"<tool_call>{JSON}</tool_call>\nDone. ", "Done. ", (ULM,)),
        (f"<tool_call>{JSON}", "", (ULM,)),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", ()),
        ("a <tool_call>no", "a <tool_call>no", ()),
        ("a\n<tool_call>no</tool_call> b", "a\n<tool_call>no</tool_call> b", ()),
        ("a <tool", "a <tool", ()),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", (Call("f", "{}"),)),
        ('<tool_call>{"name": "f"}</tool_call>', "", (Call("f", "{}"),)),
    ],
)
def test_what_stands_between_tags_is_a_call(
    text: str, content: str, calls: tuple[Call, ...]
) -> None:
    assert read(text) == (content, calls)


def test_values_between_tags_are_what_the_schema_says() -> None:
    def parameter(name: str, value: str) -> str:
        return f"<parameter={name}>\n{value}\n</parameter>\n"

    given_values = {
        "city": "12", "days": "3", "units": "1", "where": '{"x": [1]}', "now": "True",
        "other": "4", "text": "two\n\n  lines",
    }  # fmt: skip
    body = "".join(parameter(*each) for each in given_values.items())
    content, (call,) = read(f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>")
    assert (content, call.name) == ("", "weather")
    assert json.loads(call.arguments) == {
        "city": "12", "days": 3, "units": "1", "where": {"x": [1]}, "now": True,
        "other": "4", "text": "two\n\n  lines",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["many", "", "[1"])
def test_a_value_that_is_not_what_the_schema_says_stays_text(value: str) -> None:
    text = (
        f"<tool_call><function=weather><parameter=days>{value}</parameter></function></tool_call>"
    )
    _, (call,) = read(text)
    assert json.loads(call.arguments) == {"days": value}


def test_tags_may_be_tokens_without_text() -> None:
    assert read("Hi.", Marker.CALL, JSON, Marker.CALL_END) == ("Hi.", (ULM,))


@given(
    st.lists(
        st.sampled_from(
            [JSON, "<tool_call>", "</tool_call>", "\n", " ", "a", "<", "<tool_", "{", "}"]
        ),
        max_size=12,
    ),
    st.data(),
)
def test_how_the_text_is_cut_makes_no_difference(parts: list[str], data: Any) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(*pieces) == read(text)


@given(st.text(alphabet="<tol_ca/>x{} \n"))
def test_content_without_calls_is_the_whole_text(text: str) -> None:
    content, calls = read(text)
    assert calls == ()
    assert content == text


def test_whether_a_text_is_content_is_known_when_it_is_shown() -> None:
    parser = CallParser(None, [WEATHER])
    for text, known in (("Hi", True), (" ", None), ("a", True), ("<tool", None), ("_call>", False)):
        parser.push(text)
        assert parser.in_content is known
    parser.push(JSON + "</tool_call>")
    parser.finish()
    assert parser.in_content is False
