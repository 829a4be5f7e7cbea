"""Random numbers of answers: the same for the same seed and answer, others for others."""

from midfill.engine.sampling.random_stream import RandomStream


def drawn(stream: RandomStream) -> list[float]:
    return [stream.draw() for _ in range(3)]


def test_a_seed_and_an_answer_have_their_own_numbers() -> None:
    numbers = drawn(RandomStream(7))
    assert drawn(RandomStream(7)) == numbers
    assert all(0 <= number < 1 for number in numbers)
    assert len({*numbers, *drawn(RandomStream(8)), *drawn(RandomStream(7, 1))}) == 9


def test_another_answers_numbers_begin_anew() -> None:
    stream = RandomStream(None)
    before = drawn(stream)
    assert drawn(stream.of_answer(0)) == before
    assert drawn(stream.of_answer(1)) == drawn(stream.of_answer(1)) != before
