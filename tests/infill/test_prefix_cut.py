"""The cut: what keeps it, what moves it, and that the rule keeps its bounds."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from midfill.infill.common_affixes import common_prefix
from midfill.infill.prefix_cut import (
    CutHistory,
    CutRule,
    choose_gap,
    extend_fragments,
    first_cut,
)

HEAD = "".join(f"line {number:05d}\n" for number in range(500))
BELOW = "".join(f"below {number:05d}\n" for number in range(300))


RULES = st.sampled_from([CutRule(0), CutRule(32), CutRule(400)])


class Cache:
    """Counts characters no earlier prompt begins with. Sentinels are one character each."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.computed = 0

    def ask(self, history: CutHistory, prefix: str, suffix: str) -> int:
        cut = len(history.choose_and_record(prefix, suffix).head)
        prompt = f"\1{prefix[:cut]}\2{suffix}\3{prefix[cut:]}"
        cost = len(prompt) - max((common_prefix(old, prompt) for old in self.prompts), default=0)
        self.prompts.append(prompt)
        self.computed += cost
        return cost


def test_typing_costs_what_is_typed() -> None:
    history, cache = CutHistory(), Cache()
    cache.ask(history, HEAD, BELOW)
    text = HEAD
    for typed in ("x", "y = 1", "\n", "    return 0\n" * 50, "z"):
        text += typed
        assert cache.ask(history, text, BELOW) == len(typed)


def test_deleting_what_was_typed_costs_nothing() -> None:
    history, cache = CutHistory(), Cache()
    cache.ask(history, HEAD, BELOW)
    cache.ask(history, HEAD + "typed", BELOW)
    assert cache.ask(history, HEAD + "ty", BELOW) == 0


def test_the_first_cut_leaves_room_to_delete_to_the_start_of_a_line() -> None:
    history, cache = CutHistory(), Cache()
    cache.ask(history, HEAD + "    total = 12", BELOW)
    assert cache.ask(history, HEAD + "    ", BELOW) == 0
    assert history.prompts[-1].head.endswith("\n")


def test_a_fresh_cut_leaves_the_least_increment() -> None:
    for least in (0, 32, 400, 1000):
        history = CutHistory(CutRule(least))
        increment = history.choose_and_record(HEAD, BELOW).increment
        assert least <= len(increment) < least + 12


def test_a_short_prefix_stands_after_the_suffix_as_a_whole() -> None:
    history = CutHistory(CutRule(400))
    for prefix in ("", "i", "import os\n\npath = os.path.jo", HEAD[:399]):
        assert first_cut(prefix) == 0
        assert history.choose_and_record(prefix, BELOW).head == ""
    assert first_cut(HEAD[:420]) > 0


def test_a_moved_caret_is_not_left_close_to_an_old_cut() -> None:
    """A cached cut close before the caret would be cheaper by a few lines, but serve it badly."""
    history = CutHistory(CutRule(400))
    text = HEAD + BELOW
    old = len(history.choose_and_record(HEAD, BELOW).head)
    caret = old + 24
    assert len(history.choose_and_record(text[:caret], text[caret:]).increment) >= 400


def test_deletions_may_come_half_as_close() -> None:
    history = CutHistory(CutRule(400))
    old = len(history.choose_and_record(HEAD, BELOW).head)
    assert len(history.choose_and_record(HEAD[: old + 200], BELOW).head) == old
    assert len(history.choose_and_record(HEAD[: old + 199], BELOW).increment) >= 400


def test_an_edit_below_keeps_what_is_above_it() -> None:
    history, cache = CutHistory(), Cache()
    cache.ask(history, HEAD + "typed", BELOW)
    changed = BELOW[:2000] + "!" + BELOW[2001:]
    increment = len(history.prompts[-1].increment)
    assert cache.ask(history, HEAD + "typed", changed) == len(BELOW) - 2000 + 1 + increment


def test_returning_to_an_earlier_place_finds_its_prompt() -> None:
    history, cache = CutHistory(), Cache()
    text = HEAD + BELOW
    cache.ask(history, HEAD + "typed", BELOW)
    for caret in (1000, 3000, 7000):
        cache.ask(history, text[:caret], text[caret:])
    assert cache.ask(history, HEAD + "typed more", BELOW) == len(" more")


def test_a_move_puts_a_long_increment_before_the_suffix() -> None:
    history, cache = CutHistory(), Cache()
    cache.ask(history, HEAD, BELOW)
    typed = HEAD + "x = 1\n" * 300
    cache.ask(history, typed, BELOW)
    assert len(history.prompts[-1].increment) > 1800
    cache.ask(history, typed + BELOW[:12], BELOW[12:])
    assert len(history.prompts[-1].increment) < 464


def least(lengths: list[int], suffix: int) -> int:
    """Cheapest cuts for prefixes that only get shorter, all of them known beforehand.

    A stretch of requests that share a cut computes the suffix once, and as increment what the
    longest of them has more than the shortest, whose end is the latest possible cut.
    """
    best = [0]
    for last in range(1, len(lengths) + 1):
        stretches = (
            best[first] + suffix + lengths[first] - lengths[last - 1] for first in range(last)
        )
        best.append(min(stretches))
    return best[-1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 9), st.integers(1, 200), st.integers(1, 2000)), max_size=40),
    st.sampled_from([50, 600, 3600]),
    RULES,
)
def test_one_visit_costs_at_most_four_times_the_best(
    erased: list[int], length: int, rule: CutRule
) -> None:
    history, cache = CutHistory(rule), Cache()
    cache.ask(history, HEAD, "elsewhere")
    cache.computed = 0
    lengths = [len(HEAD)]
    for count in erased:
        lengths.append(max(0, lengths[-1] - count))
    cuts = set()
    for end in lengths:
        cache.ask(history, HEAD[:end], BELOW[:length])
        cuts.add(len(history.prompts[-1].head))
    # Each cut has its least increment and begins at a line; each request has three sentinels.
    slack = (rule.least_increment + 12) * len(cuts) + 3 * len(lengths)
    assert cache.computed <= 4 * least(lengths, length) + slack


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(2, 40), RULES)
@example(300, 2, CutRule(0))  # the cut moves at the break-even point
def test_edits_below_cost_at_most_twice_the_best(lines: int, edits: int, rule: CutRule) -> None:
    """Keeping the cut pays the increment each time, moving it pays the suffix once: ski rental."""
    history, cache = CutHistory(rule), Cache()
    cache.ask(history, HEAD, BELOW)
    text = HEAD + "x = 1\n" * lines
    cache.ask(history, text, BELOW)
    cache.computed = 0
    increment = len(history.prompts[-1].increment)
    for edit in range(edits):
        cache.ask(history, text, f"{BELOW[:-20]}{edit:020d}")
    least = len(text) - first_cut(text, rule)  # what a new cut leaves
    unavoidable = edits * (20 + 1 + least)
    excess = max(0, increment - least)
    best = min(edits * excess, len(BELOW) + excess)
    assert cache.computed <= 2 * best + unavoidable


def test_edits_below_do_not_move_a_cut_that_can_not_be_better() -> None:
    history, cache = CutHistory(), Cache()
    cache.ask(history, HEAD, BELOW)
    increment = len(history.prompts[-1].increment)
    for edit in range(100):
        assert cache.ask(history, HEAD, f"{BELOW[:-20]}{edit:020d}") <= 20 + 1 + increment


def test_a_standing_suffix_keeps_its_cut_whatever_rent_was_paid() -> None:
    """Rent argues for a new cut only when the suffix has to be computed anyway."""
    history = CutHistory()
    history.choose_and_record("ab", "x")
    for below in ("xy", "xyz", "x", "xy"):
        history.choose_and_record("abcdef" * 4, below)
    kept = history.prompts[-1].head
    assert history.choose_and_record("abcdef" * 4 + "g", "xy").head == kept


def test_gaps_grow_from_the_least_to_the_balance_to_the_suffix() -> None:
    rule = CutRule(100)
    assert choose_gap(4000, 0, 0, rule) == 100
    assert choose_gap(4000, 40, 1, rule) == 50 + 400
    assert choose_gap(4000, 400, 2, rule) == 50 + 4000
    assert choose_gap(4000, 9000, 3, rule) == 50 + 4000
    assert choose_gap(0, 10, 1, rule) == choose_gap(0, 10, 2, rule) == 100


def test_prompts_are_bounded_and_share_their_texts() -> None:
    history = CutHistory()
    text = HEAD + BELOW
    for typed in range(100):
        history.choose_and_record(HEAD + "x" * typed, BELOW)
    assert len(history.prompts) == 1
    distinct = {id(held): len(held) for held in history.texts()}
    assert sum(distinct.values()) <= len(text) + 200
    for caret in range(0, len(text), 100):
        history.choose_and_record(text[:caret], text[caret:])
    assert len(history.prompts) <= 16


@settings(deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", max_size=4)))
def test_fragments_keep_the_borders_of_what_still_stands(increment: str, typed: list[str]) -> None:
    pieces = extend_fragments([piece for piece in typed if piece], increment)
    assert "".join(pieces) == increment
    assert all(pieces)
    position = 0
    for piece in [piece for piece in typed if piece]:
        if not increment[position:].startswith(piece):
            break
        assert piece in pieces
        position += len(piece)


def test_fragments_are_what_was_typed_in_order() -> None:
    history = CutHistory()
    first = history.choose_and_record(HEAD, BELOW).fragments
    assert history.choose_and_record(HEAD + "pri", BELOW).fragments == (*first, "pri")
    assert history.choose_and_record(HEAD + "print(", BELOW).fragments == (*first, "pri", "nt(")
    assert history.choose_and_record(HEAD + "prinz", BELOW).fragments == (*first, "pri", "n", "z")


def test_there_is_no_better_cut_after_a_fresh_one() -> None:
    history = CutHistory()
    assert history.better_cut() is None
    history.choose_and_record(HEAD, BELOW)
    assert history.better_cut() is None


def test_a_long_increment_has_a_better_cut_and_it_is_used() -> None:
    history = CutHistory()
    history.choose_and_record(HEAD, BELOW)
    typed = HEAD + "x = 1\n" * 300
    history.choose_and_record(typed, BELOW)
    cut = history.better_cut()
    assert cut is not None
    assert 400 <= len(typed) - cut < 464
    history.record_prompt(typed, BELOW, cut)
    assert len(history.choose_and_record(typed + "y", BELOW).head) == cut
    assert history.better_cut() is None


def test_a_deletion_close_to_the_cut_has_a_better_cut() -> None:
    history = CutHistory()
    history.choose_and_record(HEAD, BELOW)
    head = len(history.prompts[-1].head)
    history.choose_and_record(HEAD[: head + 203], BELOW)
    cut = history.better_cut()
    assert cut is not None
    assert cut < head
    history.record_prompt(HEAD[: head + 203], BELOW, cut)
    assert history.better_cut() is None
    assert len(history.choose_and_record(HEAD[: head + 190], BELOW).head) == cut


@settings(deadline=None)
@given(st.lists(st.integers(-600, 600), max_size=20), st.integers(0, 3000))
def test_recording_better_cuts_terminates(moves: list[int], length: int) -> None:
    history = CutHistory()
    text = HEAD
    for move in moves:
        text = text[: len(text) + move] if move < 0 else text + BELOW[:move]
        history.choose_and_record(text, BELOW[:length])
        cut = history.better_cut()
        if cut is not None:
            assert 0 <= cut <= len(text)
            history.record_prompt(text, BELOW[:length], cut)
            assert history.better_cut() is None
