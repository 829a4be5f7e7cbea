"""Summaries' numbers: shared by cached slots, given back, never two pages' at once."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from midfill.kv.pool import SlotAllocator
from midfill.methods.sparse_decode.summaries import SummaryTable


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_pages_are_known_by_their_slots_while_these_are_held() -> None:
    allocator = SlotAllocator(100)
    table = SummaryTable(allocator)
    held = allocator.allocate(40)
    ends = held[15::16]
    first = table.find("v", ends)
    assert table.missing(first).tolist() == [0, 1]
    table.mark(first, written=True)
    table.release(first)
    again = table.find("v", ends)
    assert again.tolist() == first.tolist()
    assert not len(table.missing(again))
    assert table.find("another", ends).tolist() != first.tolist()
    allocator.free(held)
    assert allocator.allocate(40).tolist() == held.tolist()
    fresh = table.find("v", ends)
    assert not set(fresh.tolist()) & set(again.tolist()), "the first sequence still uses them"
    assert table.missing(fresh).tolist() == [0, 1]


def test_numbers_that_nobody_uses_are_given_out_again() -> None:
    allocator = SlotAllocator(100)
    table = SummaryTable(allocator)
    first = table.create(64)
    assert first.tolist() == list(range(64))
    table.mark(first, written=True)
    table.release(first[10:20])
    assert table.used == 54
    again = table.create(10)
    assert sorted(again.tolist()) == first[10:20].tolist()
    assert len(table.missing(again)) == 10
    held = allocator.allocate(100)
    known = table.find("v", held)
    table.release(known)
    allocator.free(held)
    allocator.allocate(100)
    before = table.used
    table.create(64)  # takes those that stale slots still know
    assert table.used < before


class Tables(RuleBasedStateMachine):
    """Sequences come and go; what each page is said to be must be its own."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(24)
        self.table = SummaryTable(self.allocator)
        self.held: list[np.ndarray] = []
        self.used: list[tuple[np.ndarray, np.ndarray]] = []
        self.content: dict[int, int] = {}
        self.pages = 0
        self.page_of_slot: dict[int, int] = {}

    @rule(count=st.integers(1, 9))
    def allocate(self, count: int) -> None:
        if count <= self.allocator.free_slots:
            self.held.append(self.allocator.allocate(count))
            for slot in self.held[-1].tolist():
                self.page_of_slot[slot] = self.pages
                self.pages += 1

    @rule(place=st.integers(0, 9))
    def free(self, place: int) -> None:
        if place < len(self.held):
            self.allocator.free(self.held.pop(place))

    @rule(place=st.integers(0, 9))
    def find(self, place: int) -> None:
        if place >= len(self.held):
            return
        own = self.held[place]
        entries = self.table.find("v", own)
        missing = set(self.table.missing(entries).tolist())
        for number, (slot, entry) in enumerate(zip(own.tolist(), entries.tolist(), strict=True)):
            if number in missing:
                self.content[entry] = self.page_of_slot[slot]
            assert self.content[entry] == self.page_of_slot[slot]
        self.table.mark(entries, written=True)
        self.used.append((own, entries))

    @rule(count=st.integers(1, 70))
    def create(self, count: int) -> None:
        created = self.table.create(count)
        others = {entry for _, entries in self.used for entry in entries.tolist()}
        assert not others & set(created.tolist())
        for entry in created.tolist():
            self.content.pop(entry, None)
        self.table.release(created)

    @rule(place=st.integers(0, 9))
    def release(self, place: int) -> None:
        if place < len(self.used):
            self.table.release(self.used.pop(place)[1])

    @invariant()
    def nothing_leaks(self) -> None:
        others = {entry for _, entries in self.used for entry in entries.tolist()}
        assert len(others) <= self.table.used <= len(others) + 24


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=30, stateful_step_count=30)
