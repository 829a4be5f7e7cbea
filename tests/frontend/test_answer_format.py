"""The format of a model's answers, by its vocabulary and its chat template."""

import pytest
from tiny_checkpoints import tiny_tokenizer
from tokenizers import AddedToken

from midfill.engine.request import EngineOutput, FinishReason, TokenLogprobs
from midfill.frontend.answer import Answer, AnswerBuilder, StopStrings
from midfill.frontend.answer_format import HarmonyFormat, TagFormat, find_answer_format
from midfill.frontend.channels import HARMONY, Call
from midfill.frontend.sampling import SamplingParams
from midfill.models.tokens.tokenizer import Tokenizer

TEMPLATE = "{{ messages }}<|endoftext|>assistant\n{% if opens %}<think>\n{% endif %}"
TAGS = ("<think>", "</think>")


def model(
    template: str | None, tokens: tuple[str, ...] = (), *, special: bool = False
) -> Tokenizer:
    """Return the tiny tokenizer with some tokens more, and with a template."""
    backend = tiny_tokenizer()
    added = [AddedToken(text, normalized=False, special=special) for text in tokens]
    (backend.add_special_tokens if special else backend.add_tokens)(added)
    return Tokenizer(backend, chat_template=template)


THINKING = [
    pytest.param(model(TEMPLATE), id="spelled"),
    pytest.param(model(TEMPLATE, TAGS), id="tokens"),
    pytest.param(model(TEMPLATE, TAGS, special=True), id="control-tokens"),
]


def built(
    tokenizer: Tokenizer,
    text: str,
    prompt: str = "<|endoftext|>assistant\n",
    finish_reason: FinishReason = "length",
    **sampling: int | tuple[str, ...],
) -> Answer:
    """Return the answer that is made of a text's tokens, one at a time."""
    format = find_answer_format(tokenizer)
    assert format is not None
    channels = format.channels(tokenizer.encode(prompt, parse_special=True))
    assert channels is not None
    asked = SamplingParams(**{"max_tokens": 99, "logprobs": 0, **sampling})
    answer = AnswerBuilder(0, tokenizer, asked, StopStrings(asked.stop), channels=channels.reader())
    ids = tokenizer.encode(text, parse_special=True)
    outputs = [
        EngineOutput(
            request_id="r",
            index=0,
            token_ids=[token_id],
            finish_reason=finish_reason if place == len(ids) - 1 else None,
            logprobs=[TokenLogprobs(-1.0, [])],
        )
        for place, token_id in enumerate(ids)
    ]
    return Answer.join([delta for each in outputs if (delta := answer.push(each)) is not None])


@pytest.mark.parametrize("tokenizer", THINKING)
def test_reasoning_and_content_of_a_model_that_thinks(tokenizer: Tokenizer) -> None:
    answer = built(tokenizer, "<think>\nHé?\n</think>\n\nHi.<|endoftext|>", finish_reason="stop")
    assert (answer.reasoning, answer.text, answer.calls) == ("Hé?", "Hi.", ())
    assert answer.finish_reason == "stop"
    plain = built(tokenizer, "<b>Hi.")
    assert (plain.reasoning, plain.text) == ("", "<b>Hi.")


@pytest.mark.parametrize("tokenizer", THINKING)
def test_reasoning_that_is_cut_off_leaves_no_content(tokenizer: Tokenizer) -> None:
    answer = built(tokenizer, "<think>\nHm, so")
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm, so", "", "length")


@pytest.mark.parametrize("tokenizer", THINKING)
@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("<think>", True),
        ("<think>\n\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think><|endoftext|>", False),
        ("<think>x", False),
        ("", False),
    ],
)
def test_a_prompt_that_ends_with_the_tag_has_opened_it(
    tokenizer: Tokenizer, end: str, opened: bool
) -> None:
    answer = built(tokenizer, "Hm.</think>Hi.", f"<think>?</think><|endoftext|>assistant\n{end}")
    assert (answer.reasoning, answer.text) == (("Hm.", "Hi.") if opened else ("", "Hm.</think>Hi."))


def test_where_tags_are_tokens_a_conversation_that_spells_one_out_opens_nothing() -> None:
    tokenizer = model(TEMPLATE, TAGS)
    format = find_answer_format(tokenizer)
    assert isinstance(format, TagFormat)
    channels = format.channels(tokenizer.encode("<think>"))
    assert channels is not None
    spelled = channels.reader()
    assert spelled.read("Hi.") == "Hi."


@pytest.mark.parametrize("tokenizer", THINKING)
def test_stop_strings_and_log_probabilities_are_the_contents(tokenizer: Tokenizer) -> None:
    answer = built(tokenizer, "<think>\na.b\n</think>\n\nHi. a", stop=(".",))
    assert (answer.reasoning, answer.text, answer.stop_reason) == ("a.b", "Hi", ".")
    for text in ("<think>\nab\n</think>\n\nHi.", "Hi.", "<", "<b>"):
        answer = built(tokenizer, text)
        assert "".join(report.chosen.text for report in answer.logprobs) == answer.text


def test_a_format_is_known_by_vocabulary_and_template() -> None:
    harmony = model("<|start|>", tuple(HARMONY), special=True)
    assert isinstance(find_answer_format(harmony), HarmonyFormat)
    assert find_answer_format(model(None, tuple(HARMONY), special=True)) is None
    assert find_answer_format(model("<|start|>")) is None
    assert find_answer_format(model(None, TAGS)) is None
    assert find_answer_format(model("{{ messages }}", TAGS)) is None
    closing = "{{ messages[0].content.split('</think>')[-1] }}"
    assert isinstance(find_answer_format(model(closing)), TagFormat)


@pytest.mark.parametrize(
    ("template", "opening"),
    [("{{ '[THINK]' }}", "[THINK]"), ("{{ '<seed:think>' }}", "<seed:think>")],
)
def test_other_models_have_other_tags(template: str, opening: str) -> None:
    format = find_answer_format(model(template))
    assert isinstance(format, TagFormat)
    assert format.think is not None
    assert format.think.opening == opening


CALLING = "{{ tools }}<tool_call></tool_call>"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("special", [False, True], ids=["with text", "control tokens"])
@pytest.mark.parametrize("tokens", [(), ("<tool_call>", "</tool_call>")], ids=["spelled", "tokens"])
def test_calls_are_told_from_the_content_of_chats_with_tools(
    tokens: tuple[str, ...], special: bool
) -> None:
    tokenizer = model(CALLING, tokens, special=special)
    format = find_answer_format(tokenizer)
    assert format is not None
    assert (format.has_calls, format.has_reasoning) == (True, False)
    assert format.channels([]) is None
    channels = format.channels([], TOOLS)
    assert channels is not None
    reader = channels.reader()
    for token_id in tokenizer.encode(CALL, parse_special=True):
        marker = channels.markers.get(token_id)
        written = tokenizer.token_bytes(token_id).decode()
        assert reader.read(written if marker is None else marker) == ""
    assert reader.finish() == ""
    assert Call.join(reader.take()[1]) == (Call("f", "{}"),)


def test_a_model_may_think_and_call() -> None:
    format = find_answer_format(model(CALLING + "<think>"))
    assert format is not None
    assert (format.has_calls, format.has_reasoning) == (True, True)
    channels = format.channels([], TOOLS)
    assert channels is not None
    reader = channels.reader()
    text = f"<think>I call {CALL}.</think>\n\nSo:\n{CALL}\n"
    assert reader.read(text) + reader.finish() == "So:"
    reasoning, calls = reader.take()
    assert reasoning == f"I call {CALL}."
    assert Call.join(calls) == (Call("f", "{}"),)
