"""Healed answers: what the engine writes for prompts cut inside words."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from midfill import LLM, SamplingParams
from midfill.frontend.generation import GenerationResult
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CODE = (
    "def write_tiny(family, folder):\n    tokenizer = tiny_tokenizer(family)\n    return folder\n"
)
AFTER = "\nprint(write_tiny('llama', '.'))\n"
CONTINUATION_BYTES = [bytes([byte]) for byte in range(0x80, 0xC0)]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_folder).tokenizer


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), threads=1, kv_memory=4 * 2**20) as llm:
        yield llm


def written(result: GenerationResult, tokenizer: Tokenizer) -> bytes:
    """Return all bytes that the model wrote, including healed ones."""
    return b"".join(map(tokenizer.token_bytes, result.answers[0].token_ids))


def test_the_model_writes_the_removed_bytes_first_for_any_cut(
    llm: LLM, tokenizer: Tokenizer
) -> None:
    carets = [c for m in re.finditer(r"\w{3,}", CODE) for c in range(m.start() + 1, m.end())]
    healed_at_all = 0
    for caret in carets:
        prefix, suffix = CODE[:caret], CODE[caret:] + AFTER
        result = llm.infill(prefix, suffix, GREEDY, layout="spm")
        assert result.layout is not None
        healed = result.layout.healed
        before = prefix.encode()
        assert written(result, tokenizer).startswith(before[len(before) - healed :])
        shown = written(result, tokenizer)[healed:].decode(errors="replace")
        assert result.text == shown
        assert result.usage.completion_tokens == GREEDY.max_tokens
        healed_at_all += healed > 0
    assert healed_at_all > len(carets) // 3


def test_without_healing_the_model_continues_right_at_the_caret(
    llm: LLM, tiny_folder: Path
) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    prefix, suffix = CODE[:-5], AFTER
    prompt = PromptEncoder(checkpoint, fim_format(checkpoint), 512).infill(
        InfillRequest(prefix=prefix, suffix=suffix, layout="spm"), healing=False
    )
    (expected,) = llm.generate([prompt.token_ids], GREEDY)
    plain = llm.infill(prefix, suffix, GREEDY, layout="spm", healing=False)
    assert plain.text == expected.text
    assert plain.layout is not None
    assert plain.layout.healed == 0


def test_several_sampled_answers_all_begin_with_the_removed_bytes(
    llm: LLM, tokenizer: Tokenizer
) -> None:
    sampling = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=6, ignore_eos=True)
    result = llm.infill("x = 1\ntoke", "\n", sampling, layout="spm")
    assert result.layout is not None
    assert result.layout.healed == len("toke")
    for answer in result.answers:
        spelled = b"".join(map(tokenizer.token_bytes, answer.token_ids))
        assert spelled.startswith(b"toke")
        assert answer.text == spelled[len("toke") :].decode(errors="replace")


def test_an_accepted_answer_is_in_the_cache(llm: LLM, tokenizer: Tokenizer) -> None:
    prefix = "value = 1\n" * 8 + "    toke"
    first = llm.infill(prefix, AFTER, GREEDY)
    assert first.layout is not None
    assert first.layout.healed > 0
    accepted = llm.infill(prefix + first.text, AFTER, GREEDY)
    retokenised = len(tokenizer.encode(first.text))
    assert accepted.usage.computed_tokens <= max(8, retokenised)


def test_the_answer_is_the_same_cold_and_from_the_cache(llm: LLM, tiny_folder: Path) -> None:
    prefix, typed = "value = 2\n" * 8, ("", "llam", "llama = to", "to")
    warm = [llm.infill(prefix + more, AFTER, GREEDY) for more in typed]
    assert [answer.layout.healed for answer in warm if answer.layout] == [1, 4, 2, 2]
    assert max(answer.usage.computed_tokens for answer in warm[1:]) < 10
    with LLM(str(tiny_folder), threads=1, kv_memory=4 * 2**20) as cold:
        cold.infill(prefix, AFTER, GREEDY)  # so that the cut is the same
        assert cold.infill(prefix + typed[-1], AFTER, GREEDY).answers == warm[-1].answers


def test_a_token_that_ends_the_answer_is_never_removed(llm: LLM, tokenizer: Tokenizer) -> None:
    prefix = "x = 1;  "
    *_, stop = tokenizer.encode(prefix)
    ends = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, stop_token_ids=(stop,))
    for sampling, healed in ((GREEDY, len("  ")), (ends, 0)):
        result = llm.infill(prefix, "\n", sampling, layout="spm")
        assert result.layout is not None
        assert result.layout.healed == healed


def test_logprobs_cover_only_the_text(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
    result = llm.infill("x = 1\ntoke", "\n", sampling, layout="spm")
    (answer,) = result.answers
    reported = b"".join(report.chosen.bytes for report in answer.logprobs)
    assert reported.decode(errors="replace") == answer.text
    assert len(answer.logprobs) == 6
    assert answer.logprobs[0].offset == 0
