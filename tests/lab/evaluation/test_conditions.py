"""Conditions: their prompts, and answers to explicit layouts."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from midfill import LLM, SamplingParams
from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, TextSegment
from midfill.infill.request import InfillRequest
from midfill_lab.evaluation.conditions import (
    CONDITIONS,
    Condition,
    PromptOptions,
    choose_conditions,
    make_prompt,
    parse_conditions,
    split_as_typed,
    window,
    with_candidates,
    with_methods,
)
from midfill_lab.evaluation.models import LocalModel, ModelPrompt
from midfill_lab.evaluation.problems import Problem

PRE, SUF, MID = (Sentinel(name, place) for place, name in enumerate(("<P>", "<S>", "<M>")))
FORMAT = FimFormat("test", PRE, SUF, MID, stop=(SUF,))
SUFFIX_FIRST = FimFormat("codestral", PRE, SUF, None, order="spm")
PROBLEM = Problem(
    id="line/a.py:3:5",
    task="line",
    group="a.py",
    prefix="import os\n\n\ndef f(x):\n    re",
    hole="turn x",
    suffix="\n\nprint(f(1))\n",
)
BY_NAME = {condition.name: condition for condition in CONDITIONS}


def layout(name: str, **options: object) -> PromptLayout:
    made = make_prompt(BY_NAME[name], FORMAT, PROBLEM, PromptOptions(**options))  # type: ignore[arg-type]
    assert isinstance(made, PromptLayout)
    return made


def spelled(made: PromptLayout) -> str:
    return "".join(segment.text for segment in made.segments)


def test_each_condition_has_its_layout() -> None:
    prefix, suffix = PROBLEM.prefix, PROBLEM.suffix
    assert spelled(layout("prefix-only")) == prefix
    assert spelled(layout("psm")) == f"<P>{prefix}<S>{suffix}<M>"
    assert spelled(layout("spm")) == f"<P><S>{suffix}<M>{prefix}"
    efim = layout("efim")
    assert spelled(efim) == f"<P>{prefix[: efim.cut]}<S>{suffix}<M>{prefix[efim.cut :]}"
    assert layout("efim+healing") == efim
    for made in map(layout, ("prefix-only", "psm", "spm", "efim")):
        assert made.stop_token_ids == (SUF.token_id,)
    auto = make_prompt(BY_NAME["auto"], FORMAT, PROBLEM, PromptOptions())
    assert isinstance(auto, InfillRequest)
    assert (auto.prefix, auto.suffix, auto.layout) == (prefix, suffix, "auto")


def test_cuts_fall_on_every_character() -> None:
    cuts = {layout("efim", seed=seed).cut for seed in range(500)}
    assert cuts == set(range(len(PROBLEM.prefix) + 1))
    assert layout("efim", seed=7) == layout("efim", seed=7)


def test_typed_increments_are_tokenised_in_fragments() -> None:
    fragments = [
        segment.text
        for segment in layout("spm", typed=True).segments
        if isinstance(segment, TextSegment) and segment.role == "increment"
    ]
    assert "".join(fragments) == PROBLEM.prefix
    assert all(len(fragment) <= 8 for fragment in fragments)
    long = split_as_typed("x" * 100, random.Random(0))
    assert len(long[0]) == 60
    assert "".join(long) == "x" * 100
    assert split_as_typed("", random.Random(0)) == ()
    assert spelled(layout("psm", typed=True)) == spelled(layout("psm"))


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (1000, 1000, (PROBLEM.prefix, PROBLEM.suffix)),
        (17, 2, ("\ndef f(x):\n    re", "\n\n")),
        (16, 0, ("def f(x):\n    re", "")),
        (15, 8, ("    re", "\n\n")),
        (3, 3, (" re", "\n\n")),
    ],
)
def test_the_window_holds_whole_lines(before: int, after: int, shown: tuple[str, str]) -> None:
    assert window(PROBLEM, before, after) == shown


def test_conditions_that_apply_to_a_model_are_chosen() -> None:
    def chosen(names: list[str] | None, format: FimFormat | None, remote: bool = False) -> set[str]:
        found: tuple[Condition, ...] = choose_conditions(names, format, remote=remote)
        return {condition.name for condition in found}

    assert chosen(None, FORMAT) == set(BY_NAME)
    assert chosen(["efim", "psm"], FORMAT) == {"psm", "efim"}
    assert chosen(None, None) == {"prefix-only", "prefix-only+healing", "auto"}
    assert chosen(None, SUFFIX_FIRST) == {"prefix-only", "prefix-only+healing", "auto"}
    assert chosen(None, FORMAT, True) == {"prefix-only", "psm", "spm", "efim", "auto"}
    with pytest.raises(MidfillError, match="psm needs the model's FIM tokens"):
        chosen(["psm"], None)
    with pytest.raises(MidfillError, match="codestral reads the suffix first"):
        chosen(["efim"], SUFFIX_FIRST)
    with pytest.raises(MidfillError, match="a server can't be told"):
        chosen(["efim+healing"], FORMAT, True)


def test_names_of_conditions_are_parsed() -> None:
    assert parse_conditions("psm, auto") == ("psm", "auto")
    with pytest.raises(MidfillError, match="--conditions names pms; there are prefix-only, "):
        parse_conditions("pms")
    with pytest.raises(MidfillError, match="names nothing"):
        parse_conditions(",")


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), threads=1, kv_memory=4 * 2**20) as llm:
        yield llm


def test_explicit_layouts_give_the_answers_of_the_same_requests(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prefix, suffix = PROBLEM.prefix, PROBLEM.suffix
    options = PromptOptions()
    for name, healing in (("psm", False), ("spm", False), ("spm", True)):
        made = make_prompt(BY_NAME[name], llm.fim_format, PROBLEM, options)
        (given,) = llm.infill_all([made], greedy, healing=healing)
        asked = llm.infill(prefix, suffix, greedy, layout=name, healing=healing)  # type: ignore[arg-type]
        assert given.answers == asked.answers
        assert given.layout == asked.layout
        assert given.usage.prompt_tokens == asked.usage.prompt_tokens


def test_batched_holes_are_answered_like_single_ones(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    made = [
        make_prompt(condition, llm.fim_format, PROBLEM, PromptOptions(seed=seed))
        for seed in range(4)
        for condition in CONDITIONS
    ]
    heard: list[tuple[int, int]] = []
    together = llm.infill_all(
        made, greedy, healing=False, progress=lambda *told: heard.append(told)
    )
    assert heard == [(done, len(made)) for done in range(1, len(made) + 1)]
    for one, result in zip(made, together, strict=True):
        (alone,) = llm.infill_all([one], greedy, healing=False)
        assert alone.answers == result.answers
    assert llm.infill_all([], greedy) == []


def test_conditions_are_asked_once_more_with_each_method(llm: LLM) -> None:
    chosen = (BY_NAME["psm"], BY_NAME["auto"])
    methods = ["snapkv:budget=5,window=2", "streamingllm:budget=5", "streamingllm:budget=5"]
    asked = with_methods(chosen, methods)
    assert [(one.name, one.method) for one in asked[2:]] == [
        (f"{name} {method}", method) for method in methods[:2] for name in ("psm", "auto")
    ]
    assert asked[:2] == chosen
    prompts = [
        ModelPrompt(
            make_prompt(one, llm.fim_format, PROBLEM, PromptOptions()),
            one.healing,
            method=one.method,
        )
        for one in asked
    ]
    assert prompts[0].text == prompts[2].text
    answers = LocalModel(llm, "tiny").answer(prompts, 12, lambda done, total: None)
    assert len({answer.text for answer in answers[::2]}) > 1


def test_midfill_s_own_layout_is_asked_once_more_with_candidates(llm: LLM) -> None:
    chosen = (BY_NAME["psm"], BY_NAME["auto"])
    assert with_candidates(chosen, 1) == chosen
    asked = with_candidates(chosen, 3)
    assert [(one.name, one.candidates) for one in asked[2:]] == [("auto candidates=3", 3)]
    requests = [InfillRequest(prefix=f"{word} = ", suffix="\n") for word in ("cat", "dog", "ox")]
    prompts = [
        ModelPrompt(request, healing=True, candidates=candidates)
        for candidates in (1, 3)
        for request in requests
    ]
    heard: list[tuple[int, int]] = []
    answers = LocalModel(llm, "tiny").answer(prompts, 12, lambda *told: heard.append(told))
    assert heard == [(done, 6) for done in range(1, 7)]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    alone = [
        llm.infill(request.prefix, request.suffix, greedy, candidates=candidates).text
        for candidates in (1, 3)
        for request in requests
    ]
    assert [answer.text for answer in answers] == alone
    assert alone[:3] != alone[3:]
