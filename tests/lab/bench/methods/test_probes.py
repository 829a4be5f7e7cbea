"""Probes: a known answer is scored as if it had been generated."""

import math
import random

import pytest

from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill_lab.bench.methods.probes import (
    ContextMaker,
    Haystacks,
    Probe,
    Question,
    draw_lines,
    needle_probes,
    read_probe,
    request_probes,
    score_probe,
    served_probe,
    shared_context_probes,
    turns_probe,
)
from midfill_lab.bench.methods.session import MethodSession

CONTEXT = random.Random(0).choices(range(10, 300), k=120)
HALF = "snapkv:budget=0.5,window=8"


def generate(session: MethodSession, tokens: list[int], method: str, count: int) -> list[int]:
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    request = EngineRequest(request_id="r", token_ids=tokens, sampling=sampling, method=method)
    engine = session._engine
    engine.add(request)
    found: list[int] = []
    while engine.has_work():
        for output in engine.step():
            found += output.token_ids
    return found


def score(session: MethodSession, probe: Probe, method: str) -> list[tuple[bool, float, float]]:
    full = read_probe(session, probe, "none")
    found = score_probe(session, probe, method, full)
    return [(one.greedy, one.logprob, one.divergence) for one in found]


@pytest.mark.parametrize("method", ["none", HALF])
def test_the_greedy_answer_is_most_likely_and_any_other_is_not(
    session: MethodSession, method: str
) -> None:
    answer = generate(session, CONTEXT, method, 6)
    probe = served_probe("p", "needle", "", CONTEXT, Question((), tuple(answer)))
    assert score(session, probe, method)[0][0]
    wrong = (*answer[:5], (answer[5] + 1) % 300)
    probe = served_probe("p", "needle", "", CONTEXT, Question((), wrong))
    assert not score(session, probe, method)[0][0]


def test_full_kv_diverges_from_itself_by_nothing_and_half_of_it_does(
    session: MethodSession,
) -> None:
    probe = Probe("p", "code", "", tuple(CONTEXT), 80, ((80, 120),))
    assert score(session, probe, "none")[0][2] == 0.0
    assert score(session, probe, "snapkv:budget=1000")[0][2] == pytest.approx(0.0, abs=1e-6)
    assert score(session, probe, HALF)[0][2] > 1e-4


def test_each_answer_of_several_turns_is_scored_by_itself(session: MethodSession) -> None:
    first, second = Question((5, 6), (7, 8)), Question((9,), (10, 11, 12))
    probe = turns_probe("p", "", CONTEXT, [first, second])
    assert [probe.tokens[start:end] for start, end in probe.answers] == [(7, 8), (10, 11, 12)]
    assert probe.compress_after == len(CONTEXT) + 2, "the method sees the first question"
    scores = score(session, probe, "none")
    tokens = list(probe.tokens)
    rows = session.log_likelihoods(tokens, "none", 0, 1)
    for (start, end), (_, logprob, _) in zip(probe.answers, scores, strict=True):
        expected = [float(rows[place - 1, tokens[place]]) for place in range(start, end)]
        assert logprob == pytest.approx(math.fsum(expected) / len(expected), abs=1e-5)


def test_requests_share_the_context_and_the_method_sees_nothing_else() -> None:
    questions = [Question((5, 6), (7,)), Question((8,), (9, 10))]
    probes = request_probes("p", "", CONTEXT, questions)
    for probe, question in zip(probes, questions, strict=True):
        assert probe.compress_after == len(CONTEXT)
        assert probe.tokens == (*CONTEXT, *question.tokens, *question.answer)
        assert probe.tokens[slice(*probe.answers[0])] == question.answer


@pytest.fixture(scope="module")
def haystacks(session: MethodSession) -> Haystacks:
    return Haystacks(session.encode, 0)


def test_needles_are_at_their_depths_in_real_text(
    session: MethodSession, haystacks: Haystacks
) -> None:
    probes = needle_probes(
        session.tokenizer, haystacks, tokens=2000, depths=(0.1, 0.9), repeats=1, seed=0
    )
    assert [(one.task, one.label) for one in probes] == [
        ("needle", "0.1"), ("multi-key", "0.1"), ("needle", "0.9"), ("multi-key", "0.9"),
    ]  # fmt: skip
    for probe in probes:
        ((start, end),) = probe.answers
        text = session.tokenizer.decode(probe.tokens[:start])
        code = session.tokenizer.decode(probe.tokens[start:end])
        asked = text[text.rindex("#") :]
        needle = f"{asked}{code}.\n"
        assert text.count(needle) == 1
        depth = text.index(needle) / len(text)
        assert depth == pytest.approx(float(probe.label), abs=0.12)
        assert text.count("The pass code of") == (2 if probe.task == "needle" else 5)
        assert 1700 < len(probe.tokens) < 2100
        assert probe.compress_after == start
    again = needle_probes(
        session.tokenizer, haystacks, tokens=2000, depths=(0.1, 0.9), repeats=1, seed=0
    )
    assert again == probes


def test_shared_contexts_hold_the_answers_to_their_questions(
    session: MethodSession, haystacks: Haystacks
) -> None:
    maker = ContextMaker(session.tokenizer, session.encode, haystacks, tokens=3000, questions=3)
    probes = shared_context_probes(maker, contexts=1, seed=0)
    assert {one.label for one in probes} == {"pairs", "tracing", "labels", "functions"}
    turns = {one.label: one for one in probes if one.task == "turns"}
    decode = session.tokenizer.decode
    for label, probe in turns.items():
        context = decode(probe.tokens[: probe.compress_after])
        requests = [one for one in probes if one.task == "requests" and one.label == label]
        assert len(requests) == len(probe.answers)
        for one, answer in zip(requests, probe.answers, strict=True):
            gold = decode(probe.tokens[slice(*answer)])
            assert decode(one.tokens[slice(*one.answers[0])]) == gold
            assert gold.strip('" ') in context
        assert 2500 < probe.compress_after < 3400


def test_a_method_that_does_not_exist_is_refused_with_a_reason(session: MethodSession) -> None:
    assert "there is no method 'snapvk'" in (session.refusal("snapvk") or "")
    assert session.refusal(HALF) is None


def test_holes_are_rests_of_lines_in_the_files() -> None:
    text = "".join(f"value_{i} = compute(first={i}, second={i + 1})\n" for i in range(40))
    holes = draw_lines([text, text.replace("value", "result")], 3)
    assert len({hole.id for hole in holes}) == 3
    for hole in holes:
        whole = hole.prefix + hole.hole + hole.suffix
        assert whole in (text, text.replace("value", "result"))
        assert hole.suffix.startswith("\n")
        assert hole.hole
