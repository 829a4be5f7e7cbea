"""Candidates of a real engine: the most probable line is kept, whatever else runs."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from midfill.engine.request import EngineOutput, TokenLogprobs
from midfill.errors import GenerationError, InvalidRequestError
from midfill.frontend.answer import AnswerDelta
from midfill.frontend.generation import GenerationResult, PromptGeneration
from midfill.frontend.prompt import Prompt
from midfill.frontend.sampling import SamplingParams
from midfill.infill.candidates import MAX_CANDIDATES
from midfill.infill.confidence import ConfidenceRule, Estimator
from midfill.infill.request import InfillRequest
from midfill.llm import LLM
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, min_confidence=0.0)
NEVER = Estimator(-9.0, 0.0, 0.0, 0.0, 0.0)
CARETS = [
    ("def f(", ")\n"),
    ("class A:\n    x = pri", "\n"),
    ("import ", "\n\nx = 1\n"),
    ("a", "b"),
]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), threads=1, kv_memory=4 * 2**20) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_folder).tokenizer


def answered(llm: LLM, candidates: int) -> list[GenerationResult]:
    """Return the answers at all carets."""
    return [
        llm.infill(prefix, suffix, ending(llm, GREEDY), candidates=candidates)
        for prefix, suffix in CARETS
    ]


def ending(llm: LLM, sampling: SamplingParams) -> SamplingParams:
    """Let a third of all tokens end the answer: the tiny model never ends a line by itself."""
    ends = tuple(range(100, llm.vocab_size, 3))
    return msgspec.structs.replace(sampling, stop_token_ids=ends, max_tokens=40)


def joint(result: GenerationResult) -> float:
    confidence = result.answers[0].confidence
    assert confidence is not None
    return confidence.line.joint


def test_the_line_that_is_kept_is_at_least_as_probable_as_the_first(llm: LLM) -> None:
    first, better = answered(llm, 1), answered(llm, 4)
    gains = [joint(after) - joint(before) for before, after in zip(first, better, strict=True)]
    assert min(gains) >= 0.0
    assert max(gains) > 0.0
    for before, after, gain in zip(first, better, gains, strict=True):
        assert (before.text == after.text) or gain > 0.0


def test_answers_are_the_same_alone_and_in_a_batch_and_once_more(llm: LLM) -> None:
    alone = [each.text for each in answered(llm, 4)]
    assert alone == [each.text for each in answered(llm, 4)]
    sampling = msgspec.structs.replace(ending(llm, GREEDY), candidates=4)
    batch = llm.infill_all([InfillRequest(prefix=a, suffix=b) for a, b in CARETS], sampling)
    assert [each.text for each in batch] == alone


def test_all_candidates_cost_tokens_and_nothing_is_left_running(llm: LLM) -> None:
    first, better = answered(llm, 1), answered(llm, 4)
    cost = [sum(each.usage.completion_tokens for each in results) for results in (first, better)]
    assert cost[1] > cost[0]
    assert [each.usage.prompt_tokens for each in first] == [
        each.usage.prompt_tokens for each in better
    ]
    assert llm.stats.running == llm.stats.waiting == 0


def test_streams_and_several_answers_and_raw_prompts_have_no_candidates(llm: LLM) -> None:
    prefix, suffix = CARETS[0]
    plain = llm.infill(prefix, suffix, ending(llm, GREEDY))
    searching = msgspec.structs.replace(ending(llm, GREEDY), candidates=4)
    streamed = "".join(delta.text for delta in llm.infill_stream(prefix, suffix, searching))
    assert streamed == plain.text
    several = llm.infill(prefix, suffix, msgspec.structs.replace(searching, n=2))
    assert [answer.text for answer in several.answers] == [plain.text] * 2
    raw = [llm.generate(prefix, one)[0].text for one in (searching, ending(llm, GREEDY))]
    assert raw[0] == raw[1]


@pytest.mark.parametrize("candidates", [0, MAX_CANDIDATES + 1])
def test_a_number_out_of_range_is_refused(llm: LLM, candidates: int) -> None:
    with pytest.raises(InvalidRequestError, match="candidates must be from 1 to"):
        llm.infill("a", "b", candidates=candidates)


class Outputs:
    """An engine's outputs for one prompt, by hand."""

    def __init__(self, tokenizer: Tokenizer, least: float | None = None) -> None:
        self._tokenizer = tokenizer
        sampling = SamplingParams(max_tokens=20, candidates=3, min_confidence=least)
        rule = ConfidenceRule(NEVER, NEVER, 0.5)
        prompt = Prompt(token_ids=[5, 6], text="", infilling=True, confidence_rule=rule)
        self.request = prompt.request("r", sampling)
        self.generation = PromptGeneration(prompt, sampling, tokenizer)
        self.started: list[str] = []
        self.ended: list[str] = []

    def push(
        self,
        text: str,
        logprob: float,
        other: tuple[str, float] | None = None,
        *,
        of: str = "r",
        reason: str | None = None,
    ) -> AnswerDelta | None:
        (token_id,) = self._tokenizer.encode(text) if text else (0,)
        top = [] if other is None else [(self._tokenizer.encode(other[0])[0], other[1])]
        delta = self.generation.push(
            EngineOutput(
                request_id=of,
                index=0,
                token_ids=[token_id],
                logprobs=[TokenLogprobs(logprob, top)],
                finish_reason=reason,  # type: ignore[arg-type]
            )
        )
        follow_up = self.generation.follow_up(self.request)
        for request in follow_up.requests:
            self.started.append(request.request_id)
            self.answered = request.answered
        self.ended += follow_up.ended
        return delta


@pytest.fixture
def outputs(tokenizer: Tokenizer) -> Outputs:
    return Outputs(tokenizer)


def test_a_branch_that_turns_out_better_takes_the_place_of_the_first(
    outputs: Outputs, tokenizer: Tokenizer
) -> None:
    outputs.push("a", -0.6, ("b", -0.8))
    assert outputs.started == []
    outputs.push("c", -0.9)
    assert outputs.started == ["r/1"]
    assert outputs.answered == tokenizer.encode("b")
    assert outputs.push("d", -0.1, of="r/1") is None
    last = outputs.push("", -0.1, of="r/1", reason="stop")
    assert last is not None
    assert (last.text, last.finish_reason) == ("bd", "stop")
    assert outputs.ended == ["r"]
    assert outputs.generation.finished
    assert outputs.push("x", -0.1) is None


def test_a_branch_ends_as_soon_as_it_is_behind_a_complete_line(outputs: Outputs) -> None:
    outputs.push("a", -0.6, ("b", -0.8))
    outputs.push("c", -0.9)
    assert outputs.push("\n", -0.1) is None  # the branch may still win
    shown = outputs.push("d", -3.0, of="r/1")
    assert shown is not None
    assert shown.text == "ac\n"
    assert outputs.ended == ["r/1"]
    assert not outputs.generation.finished
    last = outputs.push("", -0.1, reason="stop")
    assert last is not None
    assert last.finish_reason == "stop"


def test_what_is_kept_is_withheld_if_it_is_not_sure_enough(tokenizer: Tokenizer) -> None:
    outputs = Outputs(tokenizer, least=0.5)
    outputs.push("a", -0.6, ("b", -0.8))
    outputs.push("c", -0.9)
    outputs.push("\n", -0.1)
    withheld = outputs.push("\n", -0.1, of="r/1")
    assert withheld is not None
    assert (withheld.text, withheld.finish_reason) == ("", "stop")
    assert withheld.confidence is not None
    assert sorted(outputs.ended) == ["r", "r/1"]


@pytest.mark.parametrize("refused", [False, True])
def test_a_branch_that_fails_or_is_refused_is_left_out(outputs: Outputs, refused: bool) -> None:
    outputs.push("a", -0.6, ("b", -0.8))
    outputs.push("c", -0.9)
    assert outputs.push("\n", -0.1) is None
    if refused:
        branch = msgspec.structs.replace(outputs.request, request_id="r/1")
        shown = outputs.generation.refuse([branch])
    else:
        shown = outputs.push("", 0.0, of="r/1", reason="error")
    assert shown is not None
    assert shown.text == "ac\n"


def test_the_first_answers_failure_is_the_prompts(outputs: Outputs) -> None:
    outputs.push("a", -0.6, ("b", -0.8))
    with pytest.raises(GenerationError):
        outputs.push("", 0.0, reason="error")
