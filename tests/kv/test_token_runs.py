"""Runs of tokens that stand elsewhere, against a search that tries every place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.kv import token_runs
from midfill.kv.token_runs import TokenRun, find_runs

TOKENS = st.integers(0, 3)  # few, so that they repeat


def ids(tokens: object) -> np.ndarray:
    return np.array(tokens, np.int32)


def naive_runs(
    tokens: list[int], start: int, sources: list[list[int]], min_length: int
) -> list[TokenRun]:
    runs, at = [], max(start, 1)
    while at < len(tokens):
        best = TokenRun(at, 0, 0, 0)
        for number, source in enumerate(sources):
            for place in range(1, len(source)):
                length = 0
                while (
                    at + length < len(tokens)
                    and place + length < len(source)
                    and tokens[at + length] == source[place + length]
                ):
                    length += 1
                if length > best.length:
                    best = TokenRun(at, length, number, place)
        if best.length >= min_length:
            runs.append(best)
        at = best.end if best.length >= min_length else at + 1
    return runs


@given(
    st.lists(TOKENS, max_size=40),
    st.integers(0, 5),
    st.lists(st.lists(TOKENS, max_size=30), max_size=4),
    st.integers(1, 5),
)
def test_finds_what_a_search_of_every_place_finds(
    tokens: list[int], start: int, sources: list[list[int]], min_length: int
) -> None:
    found = find_runs(ids(tokens), start, [ids(source) for source in sources], min_length)
    assert found == naive_runs(tokens, start, sources, min_length)


@given(st.lists(TOKENS, min_size=1, max_size=40), st.lists(TOKENS, max_size=40))
def test_windows_that_share_a_fingerprint_make_no_run(tokens: list[int], source: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            token_runs,
            "_fingerprints",
            lambda text, size: np.zeros(max(len(text) - size + 1, 0), np.uint64),
        )
        found = find_runs(ids(tokens), 0, [ids(source)], 3)
    assert found == naive_runs(tokens, 0, [source], 3)


def test_a_paragraph_that_has_moved_is_one_run() -> None:
    paragraph = list(range(100, 140))
    before = [1, *range(10), *paragraph, 2]
    after = [1, *range(50, 73), *paragraph, 3]
    (run,) = find_runs(ids(after), 0, [ids(before)], 16)
    assert run == TokenRun(start=24, length=40, source=0, source_start=11)
    assert (run.end, run.shift) == (64, 13)


def test_a_changed_token_divides_a_run_and_is_in_none() -> None:
    text = list(range(100, 160))
    changed = text.copy()
    changed[25] = 7
    first, second = find_runs(ids([1, *changed]), 0, [ids([1, *text])], 8)
    assert (first.start, first.end, second.start, second.end) == (1, 26, 27, 61)


def test_no_run_is_shorter_than_asked_for() -> None:
    text = list(range(100, 110))
    assert find_runs(ids([1, *text]), 0, [ids([2, *text])], 11) == []
    assert len(find_runs(ids([1, *text]), 0, [ids([2, *text])], 10)) == 1


def test_the_first_token_is_in_no_run() -> None:
    text = ids(range(20))
    (run,) = find_runs(text, 0, [text], 4)
    assert (run.start, run.source_start, run.length) == (1, 1, 19)


def test_a_token_repeated_for_long_is_a_run_of_its_first_places() -> None:
    (first, *_) = find_runs(ids([1] + [7] * 3000), 0, [ids([1] + [7] * 9000)], 16)
    assert (first.start, first.source_start, first.length) == (1, 1, 3000)


def test_a_long_text_takes_the_longest_of_many_places() -> None:
    generator = np.random.default_rng(0)
    sources = [ids(generator.integers(0, 50, 4000)) for _ in range(4)]
    prompt = np.concatenate((ids([7]), sources[2][500:2500], sources[0][3000:3900]))
    long_ones = [run for run in find_runs(prompt, 0, sources, 8) if run.length > 100]
    assert [(run.source, run.source_start, run.length) for run in long_ones] == [
        (2, 500, 2000),
        (0, 3000, 900),
    ]
