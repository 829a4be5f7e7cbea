"""Padded and packed batches: how prompts are packed, and what a step then computes."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.runners.forward.batch import ForwardBatch
from midfill_lab.bench.serving.batch_layout import (
    LAYOUTS,
    LayoutName,
    pack_prompts,
    packed_work,
    padded_work,
)
from midfill_lab.bench.serving.step_costs import StepWork


def batch(*requests: tuple[int, int]) -> ForwardBatch:
    """Return a batch of requests, each (rows, tokens that are cached before them)."""
    queries = np.cumsum([0, *(rows for rows, _ in requests)]).astype(np.int32)
    keys = np.cumsum([0, *(rows + cached for rows, cached in requests)]).astype(np.int32)
    nothing = np.zeros(queries[-1], np.int32)
    return ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        write_slots=nothing,
        query_indptr=queries,
        kv_indptr=keys,
        kv_slots=np.zeros(keys[-1], np.int32),
        logit_rows=queries[1:] - 1,
    )


class TestPacking:
    @settings(max_examples=1000)
    @given(st.lists(st.integers(1, 100), max_size=40))
    def test_every_prompt_is_in_one_row_and_no_two_rows_fit_one(self, lengths: list[int]) -> None:
        capacity = max(lengths, default=1)
        rows = pack_prompts(lengths, capacity)
        assert sorted(prompt for row in rows for prompt in row) == list(range(len(lengths)))
        used = [sum(lengths[prompt] for prompt in row) for row in rows]
        assert all(tokens <= capacity for tokens in used)
        assert all(one + other > capacity for one, other in itertools.combinations(used, 2))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 20))
    def test_of_few_prompts_there_is_at_most_one_row_too_many(
        self, lengths: list[int], spare: int
    ) -> None:
        capacity = max(lengths) + spare
        assert len(pack_prompts(lengths, capacity)) <= fewest_rows(lengths, capacity) + 1

    def test_edges(self) -> None:
        assert pack_prompts([], 10) == []
        assert pack_prompts([7], 10) == [[0]]
        assert len(pack_prompts([5, 5, 5], 5)) == 3
        assert len(pack_prompts([1] * 10, 5)) == 2

    @pytest.mark.parametrize("lengths", [[3, 11], [0, 4]])
    def test_prompts_that_fit_no_row_are_refused(self, lengths: list[int]) -> None:
        with pytest.raises(ValueError, match="from 1 to 10 tokens"):
            pack_prompts(lengths, 10)


def fewest_rows(lengths: Sequence[int], capacity: int) -> int:
    """Return the smallest number of rows, by trying every one for every prompt."""
    for count in range(1, len(lengths)):
        for rows in itertools.product(range(count), repeat=len(lengths)):
            used = [0] * count
            for row, length in zip(rows, lengths, strict=True):
                used[row] += length
            if max(used) <= capacity:
                return count
    return len(lengths)


class TestWork:
    skewed = batch((512, 0), *[(32, 0)] * 15)

    def test_a_padded_batch_has_as_many_tokens_as_its_longest_prompt_for_each(self) -> None:
        assert padded_work(self.skewed) == StepWork(
            rows=16 * 512, outputs=16, requests=16, keys_read=16 * 512, key_pairs=16 * 512 * 512
        )

    def test_packed_prompts_share_rows(self) -> None:
        work = packed_work(self.skewed)
        assert (work.rows, work.requests) == (2 * 512, 2)
        assert work.key_pairs == 2 * 512 * 512

    def test_this_engine_computes_each_token_once(self) -> None:
        work = StepWork.of(self.skewed)
        assert work.rows == 512 + 15 * 32
        assert work.key_pairs == 512 * 513 // 2 + 15 * (32 * 33 // 2)

    def test_answers_are_padded_to_the_longest_context(self) -> None:
        decodes = batch((1, 10), (1, 90))
        expected = StepWork(rows=2, outputs=2, requests=2, keys_read=182, key_pairs=182)
        assert padded_work(decodes) == packed_work(decodes) == expected

    def test_cached_prefixes_are_keys_of_their_row(self) -> None:
        work = packed_work(batch((30, 0), (20, 7), (10, 64), (1, 99)))
        assert (work.rows, work.requests) == (2 * 30 + 1, 3)
        assert work.keys_read == 2 * (20 + 7 + 10 + 64) + 100
        assert work.key_pairs == 2 * 30 * (20 + 7 + 10 + 64) + 100

    @given(st.integers(1, 50), st.integers(1, 8))
    def test_prompts_of_one_length_gain_no_rows(self, length: int, count: int) -> None:
        same = batch(*[(length, 0)] * count)
        works = {name: layout(same) for name, layout in LAYOUTS.items()}
        assert {work.rows for work in works.values()} == {length * count}

    @given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=12))
    def test_each_layout_computes_at_least_what_the_ragged_one_does(
        self, requests: list[tuple[int, int]]
    ) -> None:
        made = batch(*requests)
        least = StepWork.of(made)
        names: list[LayoutName] = ["padded", "packed"]
        for name in names:
            work = LAYOUTS[name](made)
            assert work.outputs == least.outputs
            assert work.rows >= least.rows
            assert work.key_pairs >= least.key_pairs
        assert packed_work(made).rows <= padded_work(made).rows
