"""Planned cuts, through whole sessions: the text before the suffix ends with a whole token."""

from functools import cache

import pytest
from code_tokenizers import CODE, SPLITS, code_tokenizer
from editing import EDITS, edited_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.prefix_cut import DEFAULT_RULE, CutRule
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.tokenizer import Tokenizer, keeps_tokens_of

FORMAT = FimFormat("test", Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3))
RULES = st.sampled_from([CutRule(0), CutRule(30), CutRule(200)])
MINIFIED = CODE.replace("\n", ";").replace("    ", "")


def planner(tokenizer: Tokenizer, rule: CutRule = DEFAULT_RULE) -> Planner:
    return Planner(FORMAT, PlannerOptions(cut_rule=rule, keeps_tokens=keeps_tokens_of(tokenizer)))


def check(layout: PromptLayout, tokenizer: Tokenizer) -> None:
    """The text before SUF ends where a token of the whole text does, and with a whole word."""
    head, increment = layout.text_of("prefix"), layout.text_of("increment")
    encode = tokenizer.encode
    assert encode(head) + encode(increment) == encode(head + increment)
    if head:
        assert increment
        assert not (_in_word(head[-1]) and _in_word(increment[0]))


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=20, deadline=None)
@given(EDITS, RULES, st.sampled_from([CODE[:3000], MINIFIED[:3000]]))
def test_after_any_edit_the_head_ends_with_a_whole_token(split, edits, rule, text) -> None:
    tokenizer = code_tokenizer(split)
    whole = planner(tokenizer, rule)
    for prefix, suffix in edited_texts(text, edits):
        layout = whole.plan_and_record(InfillRequest(prefix=prefix, suffix=suffix))
        check(layout, tokenizer)
        expected = layout.document and whole.expected_layout(layout.document)
        if expected:
            check(expected, tokenizer)


@pytest.mark.parametrize("split", ["smollm", "qwen2"])
@settings(max_examples=20, deadline=None)
@given(EDITS, RULES, st.integers(1, 600))
def test_in_windows_and_templates_too(split, edits, rule, reach) -> None:
    tokenizer = code_tokenizer(split)
    windows, templates = planner(tokenizer, rule), planner(tokenizer, rule)
    options = PlannerOptions(
        cut_rule=rule,
        keeps_tokens=keeps_tokens_of(tokenizer),
        window=WindowRule(before=max(1, reach), after=reach // 4),
    )
    whole = Planner(FORMAT, options)
    for prefix, suffix in edited_texts(CODE[:3000], edits):
        check(whole.plan_and_record(InfillRequest(prefix=prefix, suffix=suffix)), tokenizer)
        prefix, suffix = prefix[-reach:], suffix[:reach]
        check(windows.plan_and_record(InfillRequest(prefix=prefix, suffix=suffix)), tokenizer)
        filled = f"<PRE>{prefix}<SUF>{suffix}<MID>"
        check(templates.plan_and_record(InfillRequest(prefix=filled, raw=True)), tokenizer)


@pytest.mark.parametrize("head", ["import os\n\npath = os.path.jo", "if x is No", "i", "", "x = "])
def test_all_of_a_short_file_follows_the_suffix(head: str) -> None:
    layout = planner(code_tokenizer("smollm")).plan_and_record(
        InfillRequest(prefix=head, suffix="\nrest\n")
    )
    assert (layout.cut, layout.text_of("increment")) == (0, head)


def test_typing_on_at_a_cut_moves_it_when_it_would_split_a_token() -> None:
    """Deleted back to a cut after a line break, a further break joins the first to one token."""
    tokenizer = code_tokenizer("qwen2")
    rule = CutRule(0)
    session = planner(tokenizer, rule)
    text = "def f(a):\n    return a\n"
    first = session.plan_and_record(InfillRequest(prefix=text + "x = 1", suffix="\nrest"))
    assert first.text_of("prefix") == text
    later = session.plan_and_record(InfillRequest(prefix=text + "\n\n\ny = 1", suffix="\nrest"))
    check(later, tokenizer)
    assert later.cut != len(text)


@cache
def default_tokenizer() -> Tokenizer:
    """Opening the model takes longer than an example."""
    return open_checkpoint(resolve(DEFAULT_MODEL)).tokenizer


@pytest.mark.real_model
@settings(max_examples=30, deadline=None)
@given(EDITS, RULES)
def test_with_the_default_models_tokenizer(edits, rule) -> None:
    tokenizer = default_tokenizer()
    session = planner(tokenizer, rule)
    for prefix, suffix in edited_texts(CODE[:3000], edits):
        check(session.plan_and_record(InfillRequest(prefix=prefix, suffix=suffix)), tokenizer)
