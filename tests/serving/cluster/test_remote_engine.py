"""Requests to replicas that refuse, are full, or are lost."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.messages import EngineInfo, Failed
from midfill.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineSamplingParams,
    EngineStats,
    TokenLogprobs,
)
from midfill.errors import (
    EngineDeadError,
    InvalidRequestError,
    MidfillError,
    QueueFullError,
)
from midfill.serving.cluster.messages import (
    Accepted,
    FromReplica,
    KvHint,
    Output,
    ReplicaNumbers,
)
from midfill.serving.cluster.remote_engine import RemoteEngine, Resumption, with_seed

INFO = EngineInfo(
    backend="none", layers=1, weight_bytes=0, kv_bytes=0, slots=1, context=9, max_running=1,
    load_seconds=0.0,
)  # fmt: skip


def output(*tokens: int, ends: bool = False) -> Output:
    """Return a message with tokens."""
    reason = "stop" if ends else None
    return Output(
        EngineOutput(request_id="r", index=0, token_ids=list(tokens), finish_reason=reason)
    )


class ScriptedReplicas:
    """Replicas that answer by a script, one line of it per request that they are sent."""

    def __init__(self, *script: list[FromReplica | MidfillError]) -> None:
        self.script = list(script)
        self.avoided: list[list[str]] = []
        self.hints: list[KvHint] = []
        self.deadlines: list[float | None] = []
        self.cancelled = 0
        self.present = {"a": ReplicaNumbers(), "b": ReplicaNumbers()}

    async def ask(
        self, request: EngineRequest, document: str, avoid: list[str], hint: KvHint
    ) -> AsyncGenerator[FromReplica, None]:
        """Yield a line of the script; what is an error is raised. After its last line, hang."""
        self.avoided.append(list(avoid))
        self.hints.append(hint)
        self.deadlines.append(request.deadline)
        try:
            for message in self.script.pop(0):
                if isinstance(message, MidfillError):
                    raise message
                yield message
            await asyncio.sleep(3600)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise

    def numbers(self) -> Mapping[str, ReplicaNumbers]:
        """Return those that are there."""
        return self.present


def request(*, background: bool = False) -> EngineRequest:
    """Return a request for one greedy answer."""
    sampling = EngineSamplingParams(temperature=0.0)
    return EngineRequest(
        request_id="r", token_ids=[1], sampling=sampling, background=background, document="d"
    )


def answer(
    replicas: ScriptedReplicas, *, background: bool = False
) -> tuple[list[int], str | None, MidfillError | None]:
    """Return the tokens of an answer, how it ended, and its error."""

    async def run() -> tuple[list[int], str | None, MidfillError | None]:
        tokens, reason = list[int](), None
        with RemoteEngine(replicas, INFO).submit(request(background=background)) as stream:
            try:
                async for each in stream:
                    tokens += each.token_ids
                    reason = each.finish_reason
            except MidfillError as error:
                return tokens, reason, error
        return tokens, reason, None

    return asyncio.run(run())


LOST = EngineDeadError("the replica was lost", retry_after=1)


def test_another_replica_continues_where_one_was_lost() -> None:
    replicas = ScriptedReplicas(
        [Accepted("a"), output(1), output(2), LOST],
        [Accepted("b"), output(1, 2, 3), output(4, ends=True)],
    )
    assert answer(replicas) == ([1, 2, 3, 4], "stop", None)
    assert replicas.avoided == [[], ["a"]]


def test_every_replica_that_is_asked_has_the_deadline() -> None:
    replicas = ScriptedReplicas([Accepted("a"), LOST], [Accepted("b"), output(1, ends=True)])

    async def run() -> None:
        asked = msgspec.structs.replace(request(), deadline=1e12)
        with RemoteEngine(replicas, INFO).submit(asked) as stream:
            async for _ in stream:
                pass

    asyncio.run(run())
    assert replicas.deadlines == [1e12, 1e12]


def test_an_engine_that_restarts_within_its_replica_is_a_lost_one() -> None:
    dead = Failed.of(EngineDeadError("the engine process ended", retry_after=3))
    replicas = ScriptedReplicas(
        [Accepted("a"), output(1), dead], [Accepted("b"), output(1, 2, ends=True)]
    )
    assert answer(replicas) == ([1, 2], "stop", None)


def test_a_full_replica_is_passed_over_until_all_are_full() -> None:
    full = Failed.of(QueueFullError("too many tokens are queued", retry_after=1))
    replicas = ScriptedReplicas([Accepted("a"), full], [Accepted("b"), output(5, ends=True)])
    assert answer(replicas) == ([5], "stop", None)
    tokens, _, error = answer(ScriptedReplicas([Accepted("a"), full], [Accepted("b"), full]))
    assert tokens == []
    assert isinstance(error, QueueFullError)
    assert error.retry_after == 1


def test_what_no_replica_could_run_is_asked_once() -> None:
    refused = Failed.of(InvalidRequestError("too long", param="prompt", code="context"))
    replicas = ScriptedReplicas([Accepted("a"), refused])
    _, _, error = answer(replicas)
    assert isinstance(error, InvalidRequestError)
    assert (str(error), error.param, error.code) == ("too long", "prompt", "context")
    assert len(replicas.avoided) == 1


def test_a_request_that_fails_everywhere_can_be_sent_again() -> None:
    names = ("a", "b", "c", "d", "e", "f")
    replicas = ScriptedReplicas(*([Accepted(name), LOST] for name in names))
    _, _, error = answer(replicas)
    assert isinstance(error, EngineDeadError)
    assert error.retry_after == 1
    assert len(replicas.avoided) < len(names)


def test_without_any_replica_a_request_fails_at_once() -> None:
    none = EngineDeadError("no replica takes requests now", retry_after=5)
    _, _, error = answer(ScriptedReplicas([none]))
    assert isinstance(error, EngineDeadError)
    assert error.retry_after == 5


def test_a_stream_that_is_closed_cancels_the_request() -> None:
    replicas = ScriptedReplicas([Accepted("a"), output(1)])

    async def run() -> None:
        engine = RemoteEngine(replicas, INFO)
        with engine.submit(request()) as stream:
            await anext(stream)
        await engine.close()

    asyncio.run(run())
    assert replicas.cancelled == 1


def test_background_work_is_given_up_with_its_replica() -> None:
    assert answer(ScriptedReplicas([Accepted("a"), LOST]), background=True) == (
        [],
        "cancelled",
        None,
    )


def test_counters_never_fall_when_a_replica_goes() -> None:
    replicas = ScriptedReplicas()
    engine = RemoteEngine(replicas, INFO)
    replicas.present = {
        name: ReplicaNumbers(stats=EngineStats(running=1, prompt_tokens=10, cached_tokens=4))
        for name in ("a", "b")
    }
    assert (engine.stats.running, engine.stats.prompt_tokens) == (2, 20)
    del replicas.present["a"]
    assert (engine.stats.running, engine.stats.prompt_tokens) == (1, 20)
    assert engine.state == "ready"
    replicas.present = {}
    assert (engine.stats.running, engine.stats.cached_tokens) == (0, 8)
    assert engine.state == "restarting"


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
