"""Answers that have to begin with a half word."""

from hypothesis import given
from hypothesis import strategies as st

from midfill.serving.gateway.prompt_answers import HealedStart


class TestHealedStart:
    @given(st.text(max_size=6), st.lists(st.text(max_size=3), max_size=6))
    def test_all_text_passes_once_it_begins_as_required(
        self, required: str, pieces: list[str]
    ) -> None:
        start = HealedStart(required)
        passed = "".join(start.push(piece) for piece in pieces)
        start.finish()
        text = "".join(pieces)
        assert start.matches == text.startswith(required)
        assert passed == (text if start.matches else "")
