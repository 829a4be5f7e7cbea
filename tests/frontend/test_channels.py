"""Channels: which part of an answer is content, reasoning, or a call."""

import itertools
from collections.abc import Iterable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tiny_checkpoints import tiny_tokenizer

from midfill.engine.request import EngineOutput, FinishReason, TokenLogprobs
from midfill.frontend.answer import Answer, AnswerBuilder, StopStrings
from midfill.frontend.answer_format import HarmonyFormat
from midfill.frontend.channels import (
    HARMONY,
    Call,
    ChannelParser,
    ChannelReader,
    Event,
    Marker,
)
from midfill.frontend.sampling import SamplingParams
from midfill.models.tokens.tokenizer import Tokenizer

ASSISTANT: tuple[Event, ...] = (Marker.START, "assistant")


def events(text: str) -> list[Event]:
    """Return a text with its markers as events."""
    parts: list[Event] = []
    while text:
        place, marker = min(
            ((text.find(each), each) for each in HARMONY if each in text), default=(len(text), "")
        )
        parts += [text[:place]] if place else []
        parts += [HARMONY[marker]] if marker else []
        text = text[place + len(marker) :]
    return parts


def read(answer: Iterable[Event], opening: Sequence[Event] = ASSISTANT) -> Answer:
    """Return a whole answer, as it is read."""
    reader = ChannelReader({}, ChannelParser(opening))
    content = "".join(reader.read(event) for event in answer) + reader.finish()
    reasoning, pieces = reader.take()
    return Answer(content, (), "stop", None, (), None, reasoning, Call.join(pieces))


def shown(text: str, opening: Sequence[Event] = ASSISTANT) -> tuple[str, str, tuple[Call, ...]]:
    answer = read(events(text), opening)
    return answer.text, answer.reasoning, answer.calls


ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json"
    '<|message|>{"zone": "UTC"}<|call|>'
)


def test_final_is_content_and_analysis_is_reasoning() -> None:
    assert shown(ANSWER) == ("Hi.", "Hm.", ())


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL.replace(" <|constrain|>json", ""),
        CALL.replace(" <|constrain|>json", " json"),
        CALL.replace("assistant", "assistant to=functions.now").replace(
            "commentary to=functions.now", "commentary"
        ),
        CALL.replace("commentary", "analysis"),
        CALL.removesuffix("<|call|>"),
    ],
)
def test_a_message_to_a_function_is_a_call(call: str) -> None:
    assert shown(call) == ("", "Hm.", (Call("now", '{"zone": "UTC"}'),))


def test_calls_stay_apart() -> None:
    message = "<|start|>assistant to=functions.{}<|channel|>commentary<|message|>{}<|call|>"
    _, _, calls = shown(message.format("a", "1") + message.format("b", "") + message.format("a", 2))
    assert calls == (Call("a", "1"), Call("b", ""), Call("a", "2"))


def test_what_is_said_before_a_call_is_content() -> None:
    text = "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant" + CALL
    assert shown(text) == ("I'll look.", "Hm.", (Call("now", '{"zone": "UTC"}'),))


def test_messages_of_a_kind_are_joined_by_a_line_break() -> None:
    assert shown(f"{ANSWER}<|start|>assistant{ANSWER}") == ("Hi.\nHi.", "Hm.\nHm.", ())


@pytest.mark.parametrize("header", ["<|channel|>draft", "<|channel|>commentary to=browser.open"])
def test_other_channels_and_recipients_are_reasoning(header: str) -> None:
    """Only ``final`` is promised to be fit to be shown."""
    assert shown(f"{header}<|message|>x<|end|>") == ("", "x", ())


def test_a_message_without_a_channel_is_content() -> None:
    assert shown("<|message|>Hi.<|return|>") == ("Hi.", "", ())


@pytest.mark.parametrize("text", ["Hi.", " to", "t", "to the point", " Hi <|end|>"])
def test_an_answer_without_markers_is_content(text: str) -> None:
    assert shown(text)[0] == text.removesuffix("<|end|>")


def test_markers_that_are_spelled_out_are_text() -> None:
    said = "<|channel|>analysis<|message|>no<|end|>"
    answer = read([Marker.CHANNEL, "final", Marker.MESSAGE, said, Marker.END])
    assert (answer.text, answer.reasoning) == (said, "")


def test_a_message_ends_where_the_next_one_begins() -> None:
    """Models forget ``<|end|>``, or ``<|start|>``, or all up to the channel."""
    for left_out in ("<|end|>", "<|start|>", "<|end|><|start|>assistant"):
        assert shown(ANSWER.replace(left_out, "")) == ("Hi.", "Hm.", ())


@pytest.mark.parametrize(
    ("opening", "text", "expected"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "Hi.<|return|>", ("Hi.", "", ())),
        ("<|start|>assistant<|channel|>analysis<|message|>So", " Hm.<|end|>", ("", " Hm.", ())),
        ("<|start|>assistant<|channel|>", "final<|message|>Hi.", ("Hi.", "", ())),
        (
            "<|start|>assistant to=functions.now",
            "<|channel|>commentary<|message|>{}<|call|>",
            ("", "", (Call("now", "{}"),)),
        ),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(
    opening: str, text: str, expected: tuple[str, str, tuple[Call, ...]]
) -> None:
    assert shown(text, events(opening)) == expected


def test_a_header_that_never_ends_takes_no_more_than_its_part_of_memory() -> None:
    parser = ChannelParser(ASSISTANT)
    parser.push(Marker.CHANNEL)
    for _ in range(10_000):
        assert parser.push("analysis ") == ()
    assert sum(map(len, parser._header.values())) < 5000


PARTS = st.one_of(
    st.sampled_from(list(Marker)),
    st.sampled_from(["final", "analysis", "commentary to=functions.f", "assistant", " to=x", "t"]),
    st.text(max_size=5),
)


@given(st.lists(PARTS, max_size=20), st.data())
def test_an_answer_does_not_depend_on_how_its_text_is_cut(
    answer: list[Event], data: st.DataObject
) -> None:
    cut: list[Event] = []
    for event in answer:
        if isinstance(event, Marker):
            cut.append(event)
            continue
        places = sorted(data.draw(st.sets(st.integers(0, len(event)), max_size=3)))
        cut += [event[a:b] for a, b in itertools.pairwise([0, *places, len(event)])]
    assert read(cut) == read(answer)


@given(st.lists(PARTS, max_size=20), st.data())
def test_an_answer_that_is_cut_off_is_a_beginning_of_the_whole(
    answer: list[Event], data: st.DataObject
) -> None:
    part = read(answer[: data.draw(st.integers(0, len(answer)))])
    whole = read(answer)
    # A "t" or " to=" alone may still become a recipient, and is shown only where nothing follows.
    if part.text.lstrip() not in ("t", "to", ""):
        assert whole.text.startswith(part.text)
    assert whole.reasoning.startswith(part.reasoning)
    assert len(part.calls) <= len(whole.calls)
    for before, after in zip(part.calls, whole.calls, strict=False):
        assert before.name == after.name
        assert after.arguments.startswith(before.arguments)


@given(st.integers(0, len(events(CALL))), st.booleans())
def test_no_header_is_shown_wherever_an_answer_is_cut_off(kept: int, finals: bool) -> None:
    parts = events(ANSWER if finals else CALL)[:kept]
    answer = read(parts)
    assert answer.text in ("", "Hi.")
    assert answer.reasoning in ("", "Hm.")
    assert answer.calls in ((), (Call("now", ""),), (Call("now", '{"zone": "UTC"}'),))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tiny tokenizer with the format's tokens."""
    backend = tiny_tokenizer()
    backend.add_special_tokens(list(HARMONY))
    return Tokenizer(backend, chat_template="<|start|>")


def harmony(tokenizer: Tokenizer) -> HarmonyFormat:
    format = HarmonyFormat.of_model(tokenizer)
    assert format is not None
    return format


def built(
    tokenizer: Tokenizer,
    text: str,
    sampling: SamplingParams,
    finish_reason: FinishReason = "stop",
    step: int = 1,
) -> Answer:
    """Return the answer that ``AnswerBuilder`` makes of a text's tokens, so many at a time."""
    prompt = tokenizer.encode("<|start|>assistant", parse_special=True)
    channels = harmony(tokenizer).channels(prompt)
    assert channels is not None
    answer = AnswerBuilder(
        0, tokenizer, sampling, StopStrings(sampling.stop), channels=channels.reader()
    )
    ids = tokenizer.encode(text, parse_special=True)
    outputs = [
        EngineOutput(
            request_id="r",
            index=0,
            token_ids=ids[i : i + step],
            finish_reason=finish_reason if i + step >= len(ids) else None,
            logprobs=[TokenLogprobs(-1.0, [(j, -1.0)]) for j in ids[i : i + step]],
        )
        for i in range(0, len(ids), step)
    ]
    deltas = [delta for output in outputs if (delta := answer.push(output)) is not None]
    assert deltas[-1].finish_reason is not None
    return Answer.join(deltas)


@pytest.mark.parametrize("step", [1, 3, 100])
def test_an_answers_tokens_are_read(tokenizer: Tokenizer, step: int) -> None:
    answer = built(tokenizer, ANSWER.replace("Hi", "Hé"), SamplingParams(max_tokens=99), step=step)
    assert (answer.text, answer.reasoning) == ("Hé.", "Hm.")
    assert answer.finish_reason == "stop"
    assert tokenizer.special_tokens["<|return|>"] in tokenizer.eos_token_ids
    called = built(tokenizer, CALL, SamplingParams(max_tokens=99), step=step)
    assert called.calls == (Call("now", '{"zone": "UTC"}'),)


def test_half_a_character_belongs_to_the_message_that_it_ends(tokenizer: Tokenizer) -> None:
    begun = harmony(tokenizer).channels([tokenizer.special_tokens["<|start|>"]])
    assert begun is not None
    answer = AnswerBuilder(
        0, tokenizer, SamplingParams(max_tokens=99), StopStrings(()), channels=begun.reader()
    )
    head = tokenizer.encode("assistant<|channel|>analysis<|message|>", parse_special=True)
    rest = tokenizer.encode("<|channel|>final<|message|>Hi", parse_special=True)
    ids = [*head, tokenizer.encode("é")[0], *rest]
    delta = answer.push(
        EngineOutput(request_id="r", index=0, token_ids=ids, finish_reason="length")
    )
    assert delta is not None
    assert (delta.text, delta.reasoning) == ("Hi", "\ufffd")


def test_stop_strings_end_the_content_only(tokenizer: Tokenizer) -> None:
    """Neither a header nor reasoning has what a client is waiting for."""
    answer = built(tokenizer, ANSWER, SamplingParams(max_tokens=99, stop=("al", ".")))
    assert (answer.text, answer.reasoning, answer.stop_reason) == ("Hi", "Hm.", ".")


def test_log_probabilities_are_the_contents(tokenizer: Tokenizer) -> None:
    answer = built(tokenizer, ANSWER, SamplingParams(max_tokens=99, logprobs=0))
    assert "".join(report.chosen.text for report in answer.logprobs) == "Hi."
    assert [report.offset for report in answer.logprobs] == [0, 1, 2]


def test_log_probabilities_of_an_answer_without_markers_are_whole(tokenizer: Tokenizer) -> None:
    """What is held back until it can be no recipient's name has some, too."""
    for text in ("to the point", "to"):
        answer = built(tokenizer, text, SamplingParams(max_tokens=99, logprobs=0), "length")
        assert answer.text == text
        assert "".join(report.chosen.text for report in answer.logprobs) == text


def test_a_prompt_that_spells_a_message_out_begins_none(tokenizer: Tokenizer) -> None:
    assert harmony(tokenizer).channels(tokenizer.encode("<|start|>a")) is None
