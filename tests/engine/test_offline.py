"""Offline requests: what nobody waits for costs those nothing who do, and answers the same."""

import pytest
from toy_engine import engine, prompt, sampling, truth
from toy_runner import ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineOutput, EngineRequest, RequestHints
from serving import background, build_engine, request, serve

OFFLINE = RequestHints(offline=True)


def row(number: int, length: int = 40, **fields: object) -> EngineRequest:
    tokens = prompt(length, seed=100 + number)
    return request(f"row {number}", tokens, hints=OFFLINE, **fields)


def steps_until(one: Engine, request_id: str) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while not any(each.request_id == request_id and each.finish_reason for each in outputs):
        outputs += one.step()
    return outputs


def test_answers_are_the_same_however_often_they_are_interrupted() -> None:
    rows = [row(number) for number in range(6)]
    arrivals = {step: [request(f"r{step}", prompt(9, step))] for step in range(2, 200, 7)}
    answers = serve(engine(), rows, arrivals)
    for each in rows:
        assert answers[each.request_id, 0].tokens == truth(each.token_ids)


def test_a_request_runs_in_the_next_step_and_no_row_beside_it() -> None:
    one = engine()
    for number in range(6):
        one.add(row(number))
    for _ in range(4):
        one.step()
    batches = len(one._runner.batches)
    one.add(request("online", prompt(20)))
    outputs = steps_until(one, "online")
    assert {each.request_id for each in outputs} == {"online"}
    alone = engine()
    alone.add(request("online", prompt(20)))
    steps_until(alone, "online")
    seen = [batch.rows for batch in one._runner.batches[batches:]]
    assert seen == [batch.rows for batch in alone._runner.batches]


def test_what_was_computed_before_an_interruption_is_not_computed_again() -> None:
    one = engine()
    one.add(row(1, length=150))
    for _ in range(5):
        one.step()
    one.add(request("online", prompt(20)))
    serve(one)
    # A token runs again whose logits are needed.
    assert one.stats().computed_tokens <= 150 + 11 + 20 + 11 + 1


class MinuteHand:
    """A clock on which each step takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    perf_counter = monotonic


@pytest.mark.parametrize("max_running", [1, 4])
def test_rows_are_answered_though_the_server_never_pauses(max_running: int) -> None:
    clock = MinuteHand()
    one = build_engine(ToyRunner(512), max_running=max_running, clock=clock)
    rows = [row(number) for number in range(3)]
    for each in rows:
        one.add(each)
    answers: dict[str, list[int]] = {}
    while one.stats().waiting or one.stats().running:
        if clock.seconds < 150:  # more than can be answered
            one.add(request(f"online {clock.seconds}", prompt(20, int(clock.seconds))))
        clock.seconds += 1.0
        for output in one.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.request_id == "row 2" and output.finish_reason:
                assert 60 < clock.seconds < 150
    assert [answers[each.request_id] for each in rows] == [truth(each.token_ids) for each in rows]


def test_background_prompts_come_before_rows() -> None:
    one = engine()
    one.add(row(1))
    one.add(background("next", prompt(100)))
    outputs = steps_until(one, "next")
    assert [each.request_id for each in outputs] == ["next"]


def test_a_warm_document_stays_warm_beside_a_batch_that_is_larger_than_the_pool() -> None:
    one = engine(slots=400)
    document = prompt(100)
    serve(one, [request("before", document)])
    for number in range(0, 40, 4):
        serve(one, [row(number + each) for each in range(4)])
    assert one.stats().evicted_tokens > 400
    assert serve(one, [request("after", [*document, 1])])["after", 0].cached_tokens == 100


def test_rows_share_a_prefix_and_leave_it_before_a_document_goes() -> None:
    one = engine(slots=400)
    shared = prompt(150, seed=9)
    rows = [
        request(f"row {number}", [*shared, *prompt(20, number)], hints=OFFLINE)
        for number in range(20)
    ]
    document = prompt(100)
    serve(one, [request("before", document)])
    cached = 0
    for start in range(0, 20, 4):  # as many at a time as fit beside the document
        answers = serve(one, rows[start : start + 4])
        cached += sum(answer.cached_tokens >= 100 for answer in answers.values())
    assert cached == 19
    serve(one, [request("large", prompt(180, seed=8))])
    assert serve(one, [request("after", [*document, 1])])["after", 0].cached_tokens == 100


def test_rows_of_a_tenant_count_nothing_against_its_own_requests() -> None:
    one = engine(max_running=1)
    for number in range(20):
        one.add(row(number, tenant="ours"))
    for _ in range(30):
        one.step()
    for number in range(4):
        for tenant in ("ours", "theirs"):
            one.add(request(f"{tenant}{number}", prompt(100, number), tenant=tenant))
    order: dict[str, None] = {}
    while one.has_work():
        order |= dict.fromkeys(each.request_id for each in one.step())
    names = [name for name in order if not name.startswith("row")]
    assert abs(names.index("ours3") - names.index("theirs3")) <= 4
    assert names[0] == "ours0"


def test_a_row_pins_no_kv_and_several_answers_of_one_are_interrupted_too() -> None:
    rows = [row(number, sampling=sampling(n=3)) for number in range(3)]
    arrivals = {step: [request(f"r{step}", prompt(9, step))] for step in range(2, 100, 5)}
    answers = serve(engine(max_running=4), rows, arrivals)
    for each in rows:
        expected = truth(each.token_ids)
        assert [answers[each.request_id, index].tokens for index in range(3)] == [expected] * 3


def test_a_cancelled_row_is_gone_whether_it_runs_or_waits() -> None:
    one = engine(max_running=2)
    for number in range(4):
        one.add(row(number))
    one.step()
    for number in range(4):
        one.cancel(f"row {number}")
    outputs = one.step()
    assert sorted(each.request_id for each in outputs) == [f"row {number}" for number in range(4)]
    assert not one.has_work()


class TestAStepThatIsGivenUp:
    def test_leaves_everything_as_it_was(self) -> None:
        one = engine()
        looks = 0

        def interrupted() -> bool:
            nonlocal looks
            looks += 1
            return looks % 3 == 0

        one.interrupted = interrupted
        rows = [row(number) for number in range(5)]
        answers = serve(one, rows)
        assert looks > 10
        for each in rows:
            assert answers[each.request_id, 0].tokens == truth(each.token_ids)

    def test_makes_way_for_a_request_in_the_next_one(self) -> None:
        one = engine()
        one.add(row(1))
        for _ in range(3):
            one.step()
        one.interrupted = lambda: True
        computed = one.stats().computed_tokens
        assert one.step() == []
        assert one.stats().computed_tokens == computed
        one.add(request("online", prompt(20)))
        outputs = steps_until(one, "online")
        assert {each.request_id for each in outputs} == {"online"}

    def test_has_offline_rows_only(self) -> None:
        one = engine()
        one.interrupted = lambda: True
        assert serve(one, [request("online", prompt(20))])["online", 0].tokens
