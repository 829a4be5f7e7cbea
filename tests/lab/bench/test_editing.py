"""Sessions are what an editor would send."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from editing import SOURCES, session

from midfill_lab.bench.editing import SESSION_KINDS, RoundKind, edit_session


class TestSessions:
    @pytest.mark.parametrize("kind", SESSION_KINDS)
    def test_every_kind_gives_as_many_requests_as_asked_for(self, kind: str) -> None:
        assert len(session(kind)) == 150

    def test_the_same_seed_gives_the_same_session_and_another_one_does_not(self) -> None:
        assert session("mix", seed=3) == session("mix", seed=3)
        assert session("mix", seed=3) != session("mix", seed=4)

    def test_the_mix_holds_everything_that_users_do(self) -> None:
        kinds = {one.kind for one in session("mix", rounds=1500)}
        assert kinds == set(get_args(RoundKind))

    def test_plain_typing_only_ever_adds_at_the_caret(self) -> None:
        rounds = session("typing")
        for before, one in pairwise(rounds):
            if one.kind == "type" and before.suffix == one.suffix:
                assert one.prefix.startswith(before.prefix)
                assert len(one.prefix) > len(before.prefix)

    def test_undo_brings_an_earlier_text_back(self) -> None:
        seen = set()
        for one in session("undo", rounds=400):
            text = one.prefix + one.suffix
            if one.kind == "undo":
                assert text in seen
            seen.add(text)

    def test_edits_below_leave_the_caret_where_it_is(self) -> None:
        rounds = session("edits below", rounds=400)
        pairs = [(before, one) for before, one in pairwise(rounds) if one.kind == "below"]
        assert len(pairs) > 10
        # In between, the user can have gone on to another place without a request.
        stayed = [(before, one) for before, one in pairs if before.prefix == one.prefix]
        assert len(stayed) > len(pairs) / 2
        assert all(before.suffix != one.suffix for before, one in stayed)

    def test_a_shown_completion_is_what_was_accepted(self) -> None:
        rounds = session("completions", rounds=300)
        for before, one in pairwise(rounds):
            if one.kind in ("accept", "partial"):
                assert (before.prefix + before.shown).startswith(one.prefix)


def test_lines_may_be_opened_before_they_are_written() -> None:
    for opens in (False, True):
        mix = replace(SESSION_KINDS["typing"], opens_lines=opens)
        rounds = edit_session(SOURCES, mix, rounds=300, seed=1)
        typed = [one for one in rounds if one.kind == "type"]
        inside = [one for one in typed if one.suffix[:1] not in ("", "\n")]
        assert bool(inside) != opens
        written = {line for one in rounds for line in one.prefix.split("\n")[:-1]}
        assert written <= {line for text in SOURCES.values() for line in text.split("\n")}
