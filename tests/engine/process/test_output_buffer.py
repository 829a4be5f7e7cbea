"""OutputBuffer: what is sent at once, what is held, and that nothing is lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.process.output_buffer import OutputBuffer
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams, TokenLogprobs

WORDS = {0: b"", 1: b"a", 2: b"bc", 3: b"d\n", 4: b"e"}


def token_bytes(token_id: int) -> bytes:
    return WORDS[token_id]


def request(
    name: str = "x",
    *,
    interval: float = 1.0,
    stop_bytes: bytes = b"",
    begins_with: bytes = b"",
    sent_at_once: int = 0,
    n: int = 1,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[1],
        sampling=EngineSamplingParams(n=n),
        stream_interval=interval,
        stop_bytes=stop_bytes,
        begins_with=begins_with,
        sent_at_once=sent_at_once,
    )


def output(*tokens: int, name: str = "x", index: int = 0, last: bool = False) -> EngineOutput:
    return EngineOutput(
        request_id=name,
        index=index,
        token_ids=list(tokens),
        finish_reason="length" if last else None,
    )


def sent(buffer: OutputBuffer, now: float) -> list[tuple[str, int, list[int]]]:
    return [(one.request_id, one.index, one.token_ids) for one in buffer.take(now)]


def started(asked: EngineRequest) -> OutputBuffer:
    """A buffer that has sent a request's first token."""
    buffer = OutputBuffer(token_bytes)
    buffer.register(asked)
    buffer.add([output(1)], 0.0)
    assert sent(buffer, 0.0) == [("x", 0, [1])]
    return buffer


def test_as_many_tokens_are_sent_at_once_as_are_asked_for() -> None:
    buffer = started(request(sent_at_once=2))
    buffer.add([output(2)], 0.1)
    assert sent(buffer, 0.1) == [("x", 0, [2])]
    buffer.add([output(4)], 0.2)
    assert sent(buffer, 0.2) == []


def test_the_first_token_is_sent_at_once_and_the_next_ones_together() -> None:
    buffer = started(request())
    buffer.add([output(2)], 0.1)
    buffer.add([output(4)], 0.6)
    assert sent(buffer, 1.0) == []
    assert sent(buffer, 1.1) == [("x", 0, [2, 4])]
    buffer.add([output(1)], 1.2)
    assert sent(buffer, 1.2) == []


def test_the_end_is_sent_at_once_with_all_that_was_held() -> None:
    buffer = started(request())
    buffer.add([output(2)], 0.1)
    buffer.add([output(4, last=True)], 0.2)
    assert [(one.token_ids, one.finish_reason) for one in buffer.take(0.2)] == [([2, 4], "length")]


def test_a_token_that_may_complete_a_stop_string_is_sent_at_once() -> None:
    buffer = started(request(stop_bytes=b"\n"))
    buffer.add([output(2)], 0.1)
    assert sent(buffer, 0.1) == []
    buffer.add([output(3)], 0.2)
    assert sent(buffer, 0.2) == [("x", 0, [2, 3])]
    buffer.add([output(4)], 1.15)
    assert sent(buffer, 1.15) == []  # it was not held since 0.1


def test_tokens_of_healed_bytes_are_sent_at_once_until_text_is_seen() -> None:
    buffer = OutputBuffer(token_bytes)
    buffer.register(request(begins_with=b"ab"))
    for now, token in enumerate((1, 2)):
        buffer.add([output(token)], now / 10)
        assert sent(buffer, now / 10) == [("x", 0, [token])]
    buffer.add([output(4)], 0.3)
    assert sent(buffer, 0.3) == []


def test_an_answer_that_is_not_streamed_is_held_until_its_end_or_a_stop_string() -> None:
    buffer = started(request(interval=math.inf, stop_bytes=b"\n"))
    buffer.add([output(2)], 0.1)
    assert sent(buffer, 1e9) == []
    buffer.add([output(3)], 1e9)
    assert sent(buffer, 1e9) == [("x", 0, [2, 3])]


def test_all_streams_are_sent_once_one_was_held_long_enough() -> None:
    buffer = OutputBuffer(token_bytes)
    for name, interval in (("slow", 5.0), ("fast", 1.0), ("whole", math.inf)):
        buffer.register(request(name, interval=interval))
        buffer.add([output(1, name=name)], 0.0)
    sent(buffer, 0.0)
    for name in ("slow", "fast", "whole"):
        buffer.add([output(2, name=name)], 0.5)
    assert sent(buffer, 1.5) == [("slow", 0, [2]), ("fast", 0, [2])]
    assert sent(buffer, 1e9) == []


def test_many_streams_are_held_longer() -> None:
    buffer = OutputBuffer(token_bytes)
    names = [f"r{number}" for number in range(100)]
    for name in names:
        buffer.register(request(name, interval=0.025))
        buffer.add([output(1, name=name)], 0.0)
    assert len(sent(buffer, 0.0)) == 100
    buffer.add([output(2, name=name) for name in names], 0.0)
    assert sent(buffer, 0.1) == []
    assert len(sent(buffer, 0.5)) == 100


@pytest.mark.parametrize("interval", [0.0, 1.0])
def test_unknown_requests_and_those_without_an_interval_are_never_held(interval: float) -> None:
    buffer = OutputBuffer(token_bytes)
    if not interval:
        buffer.register(request(interval=0.0))
    for _ in range(2):
        buffer.add([output(1)], 0.0)
        assert sent(buffer, 0.0) == [("x", 0, [1])]


def test_log_probabilities_stay_with_their_tokens() -> None:
    buffer = started(request())
    for token in (2, 4):
        logprobs = [TokenLogprobs(-float(token), [])]
        buffer.add(
            [EngineOutput(request_id="x", index=0, token_ids=[token], logprobs=logprobs)], 0.0
        )
    (joined,) = buffer.take(2.0)
    assert joined.logprobs is not None
    assert [one.logprob for one in joined.logprobs] == [-2.0, -4.0]


@given(st.data())
def test_every_token_is_sent_once_and_in_order(data: st.DataObject) -> None:
    intervals = st.sampled_from((0.0, 0.5, 2.0, math.inf))
    requests = [
        request(f"r{number}", interval=data.draw(intervals), stop_bytes=b"\n", n=2)
        for number in range(3)
    ]
    buffer = OutputBuffer(token_bytes)
    for one in requests:
        buffer.register(one)
    made: dict[tuple[str, int], list[int]] = {}
    received: dict[tuple[str, int], list[int]] = {}
    going = [(one.request_id, index) for one in requests for index in range(2)]
    ended = set()
    now = 0.0
    while going:
        now += data.draw(st.sampled_from((0.1, 1.0)))
        step = []
        for key in list(going):
            tokens = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
            last = len(made.get(key, [])) > 5 or data.draw(st.booleans())
            made.setdefault(key, []).extend(tokens)
            step.append(output(*tokens, name=key[0], index=key[1], last=last))
            if last:
                going.remove(key)
        buffer.add(step, now)
        for one in buffer.take(now):
            key = (one.request_id, one.index)
            assert key not in ended
            received.setdefault(key, []).extend(one.token_ids)
            if one.finish_reason is not None:
                ended.add(key)
        assert ended == made.keys() - set(going)
    assert received == made
