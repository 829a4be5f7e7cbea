"""The ring of chunks."""

import random

from benchmarks.plugins.ring import Ring, common_lines, common_words


def lines(first: int, count: int) -> list[str]:
    return [f"value_{number} = {number}" for number in range(first, first + count)]


def ring() -> Ring:
    return Ring(random.Random(1), common_lines)


def test_a_chunk_waits_until_the_user_pauses() -> None:
    one = ring()
    one.pick(lines(0, 10), "a.py", evict=False)
    assert one.extra() == []
    assert one.update()
    assert [entry["filename"] for entry in one.extra()] == ["a.py"]
    assert not one.update()


def test_of_a_long_text_half_a_chunk_is_taken() -> None:
    one = ring()
    one.pick(lines(0, 500), "a.py", evict=False)
    one.update()
    (chunk,) = one.chunks
    assert len(chunk.lines) == 32
    assert set(chunk.lines) <= set(lines(0, 500))


def test_the_oldest_chunk_leaves() -> None:
    one = ring()
    for number in range(20):
        one.pick(lines(100 * number, 10), f"{number}.py", evict=False)
        one.update()
    assert [chunk.filename for chunk in one.chunks] == [f"{number}.py" for number in range(4, 20)]


def test_what_is_there_already_is_not_picked_again() -> None:
    one = ring()
    for _ in range(2):
        one.pick(lines(0, 20), "a.py", evict=True)
        one.update()
    one.pick(lines(0, 2), "small.py", evict=True)
    assert len(one.chunks) == 1
    assert not one.update()


def test_a_similar_chunk_is_replaced_or_stays() -> None:
    for evict, first in ((False, 0), (True, 1)):
        one = ring()
        for start in (0, 1):
            one.pick(lines(start, 60), "a.py", evict=evict)
            one.update()
        (chunk,) = one.chunks
        assert chunk.lines[0] == f"value_{first} = {first}"


def test_chunks_like_what_is_around_the_caret_leave() -> None:
    one = ring()
    for start in (0, 100):
        one.pick(lines(start, 20), f"{start}.py", evict=False)
        one.update()
    one.evict_similar(lines(5, 20))
    assert [chunk.filename for chunk in one.chunks] == ["100.py"]


def test_similarity() -> None:
    assert common_lines(["a", "b"], ["b", "c", "b"]) == 1 / 3
    assert common_words(["a b"], ["b c"]) == 0.5
    assert common_lines([], []) == 0
