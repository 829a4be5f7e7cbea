"""Token reports: a prompt's tokens, and what the same requests would have cost in PSM order."""

import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.token_report import PrefixHistory, TokenReport
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint

DOCUMENT = "".join(f"def f{number}(x):\n    return x + {number}\n\n\n" for number in range(24))
REST = "\n\nprint(f1(f2(3)))\n"


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


@pytest.fixture
def prompts(checkpoint: Checkpoint) -> PromptEncoder:
    return PromptEncoder(checkpoint, fim_format(checkpoint), 4096)


def report(prompts: PromptEncoder, request: InfillRequest, tenant: str = "") -> TokenReport:
    found = prompts.report_tokens(prompts.infill(request), tenant)
    assert found is not None
    return found


def shown(report: TokenReport, role: str) -> str:
    return "".join("".join(one.texts) for one in report.segments if one.role == role)


def test_it_holds_the_prompts_tokens_in_order_and_those_to_be_written_again(
    prompts: PromptEncoder,
) -> None:
    prompt = prompts.infill(InfillRequest(prefix=DOCUMENT + "z = toke", suffix=REST))
    found = prompts.report_tokens(prompt)
    assert found is not None
    ids = [token_id for segment in found.segments for token_id in segment.token_ids]
    assert found.healed_tokens > 0
    assert ids[: -found.healed_tokens] == prompt.token_ids
    assert [one.role for one in found.segments if one.role != "increment"] == [
        "sentinel", "prefix", "sentinel", "suffix", "sentinel",
    ]  # fmt: skip
    assert shown(found, "prefix") + shown(found, "increment") == DOCUMENT + "z = toke"
    assert shown(found, "suffix") == REST
    assert shown(found, "sentinel") == "<fim_prefix><fim_suffix><fim_middle>"


@given(st.text(max_size=40), st.text(max_size=40))
def test_texts_of_tokens_are_the_segments_text_whatever_characters_it_holds(
    checkpoint: Checkpoint, prefix: str, suffix: str
) -> None:
    encoder = PromptEncoder(checkpoint, fim_format(checkpoint), 4096)
    found = report(encoder, InfillRequest(prefix=prefix, suffix=suffix, layout="psm"))
    assert shown(found, "prefix") == prefix
    assert shown(found, "suffix") == suffix


def test_other_files_are_reported_as_context(prompts: PromptEncoder) -> None:
    other = ContextFile("LIMIT = 3\n", "limits.py")
    found = report(prompts, InfillRequest(prefix="x = ", suffix="\n", context_files=(other,)))
    assert "LIMIT = 3" in shown(found, "context")


def test_a_raw_prompt_names_its_special_tokens_and_has_no_psm_order(
    prompts: PromptEncoder,
) -> None:
    found = report(prompts, InfillRequest(prefix="<|endoftext|>x = 1", raw=True))
    (segment,) = found.segments
    assert segment.role == "raw"
    assert segment.texts[0] == "<|endoftext|>"
    assert "".join(segment.texts[1:]) == "x = 1"
    assert found.psm is None


def test_token_ids_have_no_report(prompts: PromptEncoder) -> None:
    assert prompts.report_tokens(prompts.tokens([5, 6])) is None


def test_in_psm_order_a_keystroke_costs_the_suffix_and_what_was_typed(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    first = report(prompts, InfillRequest(prefix=DOCUMENT, suffix=REST)).psm
    typed = report(prompts, InfillRequest(prefix=DOCUMENT + "y", suffix=REST)).psm
    assert first is not None
    assert typed is not None
    count = len(checkpoint.tokenizer.encode(DOCUMENT + REST)) + 3  # and three sentinels
    assert abs(first.prompt_tokens - count) <= 1
    assert first.cached_tokens == 0
    kept = len(checkpoint.tokenizer.encode(DOCUMENT)) + 1
    assert abs(typed.cached_tokens - kept) <= 1


def test_psm_prompts_are_tokenised_as_the_client_of_such_a_server_would(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    generator = random.Random(0)
    for _ in range(60):
        caret = generator.randrange(len(DOCUMENT))
        prefix, suffix = DOCUMENT[:caret], DOCUMENT[caret:]
        found = report(prompts, InfillRequest(prefix=prefix, suffix=suffix)).psm
        psm = prompts.infill(InfillRequest(prefix=prefix, suffix=suffix, layout="psm"))
        assert found is not None
        assert found.prompt_tokens == len(psm.token_ids)


def test_tenants_share_nothing_in_psm_order_either(prompts: PromptEncoder) -> None:
    request = InfillRequest(prefix=DOCUMENT, suffix=REST)
    assert report(prompts, request, "one").psm == report(prompts, request, "two").psm
    again = report(prompts, request, "one").psm
    assert again is not None
    assert again.cached_tokens == again.prompt_tokens - 1


SHORT_PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12)


@given(SHORT_PROMPTS, st.integers(1, 6))
def test_the_history_matches_as_a_search_through_all_remembered_prompts_does(
    prompts: list[list[int]], held: int
) -> None:
    history = PrefixHistory(max_prompts=held)
    for place, ids in enumerate(prompts):
        earlier = prompts[max(0, place - held) : place]
        common = max((common_prefix(ids, one) for one in earlier), default=0)
        assert history.match_and_record(ids, "") == min(common, len(ids) - 1)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_the_history_forgets_the_oldest_beyond_its_size() -> None:
    history = PrefixHistory(max_tokens=10)
    for ids in ([1] * 6, [2] * 6):
        history.match_and_record(ids, "")
    assert history.match_and_record([1] * 4, "") == 0
    assert history.match_and_record([2] * 4, "") == 3
