"""An answer that one replica begins and another one ends."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineSamplingParams,
    TokenLogprobs,
)
from midfill.errors import EngineDeadError
from midfill.serving.cluster.resumption import Resumption, with_seed


def outputs(tokens: list[int], cuts: list[int], index: int = 0) -> list[EngineOutput]:
    """Return an answer as a replica sends it: some tokens at a time."""
    places = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    pieces = [tokens[start:end] for start, end in itertools.pairwise(places)] or [[]]
    return [
        EngineOutput(
            request_id="r",
            index=index,
            token_ids=piece,
            logprobs=[TokenLogprobs(-float(token), []) for token in piece],
            prefill_seconds=0.5 if number == 0 else None,
            finish_reason="stop" if number == len(pieces) - 1 else None,
        )
        for number, piece in enumerate(pieces)
    ]


tokens = st.lists(st.integers(0, 9), max_size=20)
cuts = st.lists(st.integers(0, 20), max_size=5)


@given(tokens, st.lists(st.tuples(cuts, st.integers(0, 6)), max_size=3), cuts)
def test_a_client_sees_each_token_once_however_often_a_replica_is_lost(
    tokens: list[int], lost: list[tuple[list[int], int]], last: list[int]
) -> None:
    answers, seen = Resumption(1), list[EngineOutput]()
    for cuts, received in lost:
        for output in outputs(tokens, cuts)[:received]:
            if (new := answers.take(output)) is not None:
                seen.append(new)
        answers.restart()
    for output in outputs(tokens, last):
        if (new := answers.take(output)) is not None:
            seen.append(new)
    assert answers.finished
    assert [token for output in seen for token in output.token_ids] == tokens
    assert [each.logprob for output in seen for each in output.logprobs or ()] == [
        -float(token) for token in tokens
    ]
    assert [output.finish_reason for output in seen].count("stop") == 1
    assert [output.prefill_seconds for output in seen].count(0.5) == 1


@given(tokens.filter(bool), st.data())
def test_an_answer_that_would_go_on_differently_fails(
    tokens: list[int], data: st.DataObject
) -> None:
    answers = Resumption(1)
    first, *_ = outputs([*tokens, 1], [len(tokens)])
    answers.take(first)
    answers.restart()
    changed = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
    (whole,) = outputs(other, [])
    with pytest.raises(EngineDeadError, match="send the request again"):
        answers.take(whole)


def test_an_answer_that_ends_before_what_was_seen_fails() -> None:
    answers = Resumption(1)
    answers.take(outputs([1, 2, 3, 4], [3])[0])
    answers.restart()
    with pytest.raises(EngineDeadError):
        answers.take(outputs([1, 2], [])[0])


def test_several_answers_are_resumed_each_for_itself() -> None:
    answers = Resumption(2)
    answers.take(outputs([1, 2], [], index=0)[0])
    answers.take(outputs([3, 4], [1], index=1)[0])
    answers.restart()
    assert answers.take(outputs([1, 2], [], index=0)[0]) is None
    resumed = answers.take(outputs([3, 4], [], index=1)[0])
    assert resumed is not None
    assert resumed.token_ids == [4]
    assert answers.finished


@pytest.mark.parametrize(
    ("sampling", "seeded"),
    [
        (EngineSamplingParams(temperature=1.0), True),
        (EngineSamplingParams(temperature=0.0), False),
        (EngineSamplingParams(temperature=1.0, seed=7), False),
    ],
)
def test_sampled_answers_get_a_seed_of_their_own(
    sampling: EngineSamplingParams, seeded: bool
) -> None:
    request = EngineRequest(request_id="r", token_ids=[1], sampling=sampling)
    seeds = {with_seed(request).sampling.seed for _ in range(3)}
    assert len(seeds) == (3 if seeded else 1)
    assert (seeds != {sampling.seed}) == seeded
