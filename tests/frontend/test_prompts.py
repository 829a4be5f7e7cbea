"""Prompts: each way of asking, as token ids."""

import itertools
from pathlib import Path

import pytest

from midfill.errors import InvalidRequestError
from midfill.frontend.prompts import PromptEncoder, fim_format
from midfill.infill.request import InfillRequest
from midfill.models.checkpoint import Checkpoint, open_checkpoint

CONTEXT = 100


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


@pytest.fixture
def prompts(checkpoint: Checkpoint) -> PromptEncoder:
    return PromptEncoder(checkpoint, fim_format(checkpoint), CONTEXT)


def special(checkpoint: Checkpoint, *names: str) -> list[int]:
    return [checkpoint.tokenizer.special_tokens[name] for name in names]


def test_special_tokens_are_parsed_in_a_raw_prompt(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    ids = prompts.raw("<fim_prefix>a<fim_suffix>").token_ids
    pre, suf = special(checkpoint, "<fim_prefix>", "<fim_suffix>")
    assert ids == [pre, *checkpoint.tokenizer.encode("a"), suf]


def test_a_filled_in_template_is_planned_like_any_document(prompts: PromptEncoder) -> None:
    suffix = "\nprint(f(1))\n"
    infilled = prompts.infill(InfillRequest(prefix="def f(x):", suffix=suffix))
    raw = prompts.raw(f"<fim_prefix>def f(x): r<fim_suffix>{suffix}<fim_middle>")
    assert infilled.report is not None
    assert raw.report is not None
    assert raw.report.layout == "efim"
    assert raw.report.document == infilled.report.document


def test_special_tokens_are_not_parsed_around_a_caret(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    request = InfillRequest(prefix="a<fim_suffix>b", suffix="<fim_middle>", layout="psm")
    prompt = prompts.infill(request)
    pre, suf, mid = special(checkpoint, "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    encode = checkpoint.tokenizer.encode
    expected = [pre, *encode("a<fim_suffix>b"), suf, *encode("<fim_middle>"), mid]
    assert prompt.token_ids == expected
    assert prompt.report is not None
    assert (prompt.report.layout, prompt.report.cut) == ("psm", len(request.prefix))
    assert set(special(checkpoint, "<fim_prefix>", "<|endoftext|>")) <= set(prompt.stop_token_ids)


def test_a_model_without_sentinels_sees_the_prefix_and_says_so(checkpoint: Checkpoint) -> None:
    prompt = PromptEncoder(checkpoint, None, CONTEXT).infill(InfillRequest(prefix="ab", suffix="c"))
    assert prompt.token_ids == checkpoint.tokenizer.encode("ab")
    assert prompt.report is not None
    assert not prompt.report.sentinels
    assert prompt.report.layout == "prefix-only"


def test_token_ids_are_sent_as_they_are(prompts: PromptEncoder) -> None:
    assert prompts.tokens([5, 0, 7]).token_ids == [5, 0, 7]


@pytest.mark.parametrize("bad", [-1, 320, 10**40])
def test_unknown_token_ids_are_refused(prompts: PromptEncoder, bad: int) -> None:
    with pytest.raises(InvalidRequestError, match="token id") as raised:
        prompts.tokens([1, bad])
    assert raised.value.param == "prompt"


def test_empty_prompts_are_refused(prompts: PromptEncoder) -> None:
    for make in (lambda: prompts.raw(""), lambda: prompts.tokens([])):
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            make()


def test_an_empty_document_can_be_filled_in(prompts: PromptEncoder, checkpoint: Checkpoint) -> None:
    prompt = prompts.infill(InfillRequest(prefix="", suffix=""))
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert prompt.token_ids == special(checkpoint, *names)


@pytest.mark.parametrize("length", [CONTEXT, 10_000_000])
def test_a_prompt_that_fills_the_context_is_refused(prompts: PromptEncoder, length: int) -> None:
    with pytest.raises(InvalidRequestError, match="context") as raised:
        prompts.raw("ab" * length)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"


def test_a_growing_prefix_keeps_its_cut(prompts: PromptEncoder) -> None:
    first = prompts.infill(InfillRequest(prefix="def f(x):", suffix="\nprint(f(1))\n"))
    later = prompts.infill(InfillRequest(prefix="def f(x): ret", suffix="\nprint(f(1))\n"))
    assert later.report is not None
    assert first.report is not None
    assert later.report.document == first.report.document
    assert later.report.layout == "efim"
    assert later.report.cut == first.report.cut
    pairs = zip(first.token_ids, later.token_ids, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert len(later.token_ids) - shared < len(first.token_ids) // 2


def test_remembered_text_never_makes_a_prompt_too_long(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    line = "".join(map(chr, range(0x4E00, 0x4E00 + 40)))  # three tokens a character
    first = prompts.infill(InfillRequest(prefix=line[:28]))
    moved = prompts.infill(InfillRequest(prefix=line[12:]))
    assert len(checkpoint.tokenizer.encode(line)) > CONTEXT
    assert len(moved.token_ids) == len(first.token_ids) < CONTEXT


def test_named_fim_tokens_must_exist(checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidRequestError, match="<nope>"):
        fim_format(checkpoint, ("<fim_prefix>", "<nope>", "<fim_middle>"))
