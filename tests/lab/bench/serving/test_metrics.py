"""The figures of a load, against what follows from a few requests by hand."""

import pytest

from midfill.errors import OptionError
from midfill_lab.bench.serving.metrics import (
    Limits,
    RequestResult,
    fairness,
    jain_index,
    latency,
    parse_limits,
    program_seconds,
    spread,
    summarise,
)


def result(**fields: object) -> RequestResult:
    """Return an answer of four tokens: sent at 1, the first after 0.5 s, then 0.1, 0.1, 0.4."""
    usual: dict[str, object] = {
        "index": 0, "kind": "request", "tenant": "a", "due": 0.9, "sent": 1.0,
        "arrivals": [1.5, 1.6, 1.7, 2.1], "ended": 2.2, "prompt_tokens": 10, "cached_tokens": 4,
        "completion_tokens": 4,
    }  # fmt: skip
    return RequestResult(**(usual | fields))  # type: ignore[arg-type]


def test_times_of_an_answer() -> None:
    answer = result()
    assert answer.ttft == pytest.approx(0.5)
    assert answer.tpot == pytest.approx(0.2)
    assert answer.gaps == pytest.approx([0.1, 0.1, 0.4])
    assert answer.e2el == pytest.approx(1.2)
    assert result(completion_tokens=1, arrivals=[1.5]).tpot is None


def test_percentiles() -> None:
    found = spread(float(value) for value in range(101))
    assert found is not None
    assert (found.count, found.mean, found.p50, found.p90, found.p95, found.p99) == (
        101, 50.0, 50.0, 90.0, 95.0, 99.0
    )  # fmt: skip
    assert spread([]) is None


def test_latencies_are_those_of_complete_answers() -> None:
    found = latency([result(), result(status="queue_full", arrivals=[], ended=9.0)])
    assert found.e2el is not None
    assert found.e2el.count == 1
    assert found.itl is not None
    assert found.itl.count == 3


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("ttft:500", True),
        ("ttft:499", False),
        ("tpot:201", True),
        ("tpot:199", False),
        ("itl:401", True),
        ("itl:399", False),
        ("e2el:1201", True),
        ("ttft:600 e2el:1100", False),
    ],
)
def test_an_answer_counts_for_goodput_if_it_keeps_all_limits(text: str, kept: bool) -> None:
    assert parse_limits(text).are_met(result()) is kept


def test_limits_as_they_are_written() -> None:
    limits = parse_limits("ttft:200, tpot:50")
    assert limits == Limits(ttft=0.2, tpot=0.05)
    assert str(limits) == "ttft:200,tpot:50"


@pytest.mark.parametrize(
    ("text", "message"), [("ttft", "not 'ttft'"), ("ttfb:3", "names ttfb; there are ttft, tpot")]
)
def test_limits_that_are_none(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_limits(text)


def test_the_figures_of_a_load() -> None:
    results = [
        result(),
        result(index=1, due=2.0, sent=2.0, arrivals=[2.1, 2.2], ended=2.9, completion_tokens=2),
        result(index=2, due=2.5, sent=2.5, arrivals=[], ended=2.5, completion_tokens=0,
               prompt_tokens=0, cached_tokens=0, status="queue_full"),
    ]  # fmt: skip
    metrics = summarise(results, parse_limits("ttft:200"))
    assert (metrics.requests, metrics.completed) == (3, 2)
    assert metrics.failures == {"queue_full": 1}
    assert metrics.seconds == pytest.approx(2.0)
    assert metrics.request_throughput == pytest.approx(1.0)
    assert metrics.output_throughput == pytest.approx(3.0)
    assert metrics.goodput == pytest.approx(0.5)
    assert metrics.good_share == pytest.approx(1 / 3)
    assert metrics.cached_share == pytest.approx(0.4)
    assert metrics.lateness is not None
    assert metrics.lateness.mean == pytest.approx(0.1 / 3)
    assert metrics.fairness is None
    assert metrics.by_kind == {}


def test_kinds_have_latencies_of_their_own() -> None:
    metrics = summarise([result(kind="chat"), result(kind="document", ended=3.0)])
    chat, document = metrics.by_kind["chat"].e2el, metrics.by_kind["document"].e2el
    assert chat is not None
    assert document is not None
    assert (chat.p50, document.p50) == (pytest.approx(1.2), pytest.approx(2.0))
    assert metrics.goodput is None


def test_jains_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 3.0]) == pytest.approx(0.8)
    assert jain_index([0.0, 0.0]) == 1.0


def test_service_counts_until_the_last_arrival() -> None:
    late = result(index=1, tenant="b", due=1.65, sent=1.65, arrivals=[1.8, 1.9], ended=2.0)
    found = fairness([result(), late])
    assert found is not None
    # Of the first answer's four messages, two came by 1.65; of the second one's none.
    assert found.service == {"a": 12.0, "b": 0.0}
    assert found.jain == pytest.approx(0.5)
    assert found.ttft_ratio == pytest.approx(0.5 / 0.15)


def test_a_program_takes_from_its_first_request_to_its_last_answer() -> None:
    turns = [
        result(program=7), result(program=7, turn=1, sent=3.0, ended=4.5),
        result(program=8), result(program=8, turn=1, status="unsent"),
    ]  # fmt: skip
    assert program_seconds(turns) == {7: pytest.approx(3.5)}
