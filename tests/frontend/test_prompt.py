"""Prompts for the engine, and stop strings that are tokens.

The model's own end an answer as tokens, those of other families don't matter.
"""

from pathlib import Path

import pytest
from client_prompts import CLIENT_PROMPTS, NEXT_EDIT_PROMPTS, ClientPrompt

from midfill.engine.request import TokenSpans
from midfill.frontend.prompt import with_token_stops
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest, RequestedLayout
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> PromptEncoder:
    return PromptEncoder(checkpoint, fim_format(checkpoint), 512)


def resolved(
    checkpoint: Checkpoint, prompts: PromptEncoder, prompt: str, *stops: str
) -> SamplingParams:
    sampling = SamplingParams(stop=stops, stop_token_ids=(70,))
    return with_token_stops(sampling, [prompts.raw(prompt)], checkpoint.tokenizer)


@pytest.mark.parametrize("one", CLIENT_PROMPTS, ids=lambda one: one.client)
def test_only_text_is_left_of_what_editors_send_with_a_template(
    checkpoint: Checkpoint, prompts: PromptEncoder, one: ClientPrompt
) -> None:
    sampling = resolved(checkpoint, prompts, one.prompt, *one.stop)
    texts = {"/src/", "#- coding: utf-8", "```", "</fim_middle>", "</code>", "<END>"}
    texts |= {"//", "t.", "\nt", "\n+++++ "}
    assert set(sampling.stop) == texts.intersection(one.stop)
    own = checkpoint.tokenizer.special_tokens
    named = {own[stop] for stop in one.stop if stop in own}
    ends = {*checkpoint.tokenizer.eos_token_ids, *prompts.raw(one.prompt).stop_token_ids}
    assert set(sampling.stop_token_ids) == {70, *(named - ends)}


def test_in_any_other_prompt_foreign_tokens_are_text_and_own_ones_are_both(
    checkpoint: Checkpoint, prompts: PromptEncoder
) -> None:
    middle = checkpoint.tokenizer.special_tokens["<fim_middle>"]
    stops = ("<|file_sep|>", "<fim_middle>", "</s>")
    for prompt in ("def f(", NEXT_EDIT_PROMPTS["sweep"]):
        sampling = resolved(checkpoint, prompts, prompt, *stops)
        assert sampling.stop == stops
        assert sampling.stop_token_ids == (70, middle)


def test_an_end_token_is_a_stop_only_where_it_would_not_end_the_answer(
    checkpoint: Checkpoint, prompts: PromptEncoder
) -> None:
    (end,) = checkpoint.tokenizer.eos_token_ids
    for ignored, tokens in ((False, ()), (True, (end,))):
        sampling = SamplingParams(stop=("<|endoftext|>",), ignore_eos=ignored)
        sampling = with_token_stops(sampling, [prompts.raw("x")], checkpoint.tokenizer)
        assert sampling.stop_token_ids == tokens


def test_the_text_before_the_suffix_is_counted(prompts: PromptEncoder) -> None:
    assert prompts.format is not None
    assert prompts.format.suffix is not None
    prefix = "def double(x):\n    return 2 * x\n\n" * 4
    prompt = prompts.infill(
        InfillRequest(prefix=prefix, suffix="\n\nprint(double(3))\n", layout="psm")
    )
    head = prompt.head_tokens
    assert prompt.token_ids[head] == prompts.format.suffix.token_id
    assert prompt.request("a", SamplingParams()).head_tokens == head > 20
    assert prompts.raw(prefix).head_tokens == 0


def test_text_is_left_alone(checkpoint: Checkpoint, prompts: PromptEncoder) -> None:
    sampling = SamplingParams(stop=("\n\n", "def "))
    assert with_token_stops(sampling, [prompts.raw("x")], checkpoint.tokenizer) is sampling


@pytest.mark.parametrize("layout", ["psm", "efim", "spm"])
def test_a_request_says_where_the_documents_text_is(
    checkpoint: Checkpoint, prompts: PromptEncoder, layout: RequestedLayout
) -> None:
    prefix, suffix = "alpha = 1\nbeta = 2\ngam", "ma = 3\ndelta = 4\n"
    file = ContextFile("other = 5\n", "other.py")
    prompt = prompts.infill(
        InfillRequest(prefix=prefix, suffix=suffix, layout=layout, context_files=(file,))
    )
    request = prompt.request("r", SamplingParams())

    def text(spans: TokenSpans) -> str:
        ids = [prompt.token_ids[at] for start, end in spans for at in range(start, end)]
        return checkpoint.tokenizer.decode(ids)

    healed = prompt.begins_with.decode()
    assert text(request.before_caret) + healed == prefix
    assert text(request.after_caret) == suffix


def test_a_raw_prompt_has_no_caret(prompts: PromptEncoder) -> None:
    for prompt in (prompts.raw("alpha = 1\n"), prompts.tokens([5, 6, 7])):
        request = prompt.request("r", SamplingParams())
        assert request.before_caret == request.after_caret == ()
