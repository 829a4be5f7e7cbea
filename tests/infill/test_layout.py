"""Layouts: the order of segments, and that the text is all there."""

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, Segment, TextSegment, in_psm_order, lay_out

PRE, SUF, MID = Sentinel("PRE", 1), Sentinel("SUF", 2), Sentinel("MID", 3)
PSM = FimFormat("test", PRE, SUF, MID)
SEED = FimFormat("test", PRE, SUF, MID, order="spm")
CODESTRAL = FimFormat("test", PRE, SUF, None, order="spm")


def shape(format: FimFormat, prefix: str, suffix: str, cut: int) -> list[str]:
    segments, _ = lay_out(format, prefix, suffix, cut)
    return [segment.text for segment in segments]


def test_psm_families_put_the_suffix_at_the_cut() -> None:
    assert shape(PSM, "abc", "xyz", 3) == ["PRE", "abc", "SUF", "xyz", "MID"]
    assert shape(PSM, "abc", "xyz", 2) == ["PRE", "ab", "SUF", "xyz", "MID", "c"]
    assert shape(PSM, "abc", "xyz", 0) == ["PRE", "SUF", "xyz", "MID", "abc"]


def test_suffix_first_families_have_one_order_whatever_the_cut() -> None:
    for cut in (0, 2, 3):
        assert shape(SEED, "abc", "xyz", cut) == ["SUF", "xyz", "PRE", "abc", "MID"]
        assert shape(CODESTRAL, "abc", "xyz", cut) == ["SUF", "xyz", "PRE", "abc"]


@pytest.mark.parametrize(("cut", "name"), [(3, "psm"), (1, "efim"), (0, "spm")])
def test_a_layout_is_named_by_its_cut(cut: int, name: str) -> None:
    assert lay_out(PSM, "abc", "xyz", cut)[1] == name
    assert lay_out(SEED, "abc", "xyz", cut)[1] == "spm"


@settings(deadline=None)
@given(st.text(), st.text(), st.integers(0, 50), st.sampled_from([PSM, SEED, CODESTRAL]))
def test_no_text_is_lost_and_no_segment_is_empty(prefix, suffix, cut, format) -> None:
    cut = min(cut, len(prefix))
    segments, name = lay_out(format, prefix, suffix, cut)
    layout = PromptLayout(segments=segments, layout=name, cut=cut)
    assert layout.planned_prefix == prefix
    assert layout.planned_suffix == suffix
    assert all(segment.text for segment in segments)
    texts = [segment for segment in segments if isinstance(segment, TextSegment)]
    assert len(segments) - len(texts) == (2 if format.middle is None else 3)


@settings(deadline=None)
@given(st.text(), st.text(), st.integers(0, 50), st.booleans())
def test_any_layout_in_psm_order_is_what_psm_would_send(
    prefix: str, suffix: str, cut: int, has_context: bool
) -> None:
    context = (TextSegment("# other file", "context"),) if has_context else ()
    cut = min(cut, len(prefix))
    segments, name = lay_out(PSM, prefix, suffix, cut, context_segments=context)
    found = in_psm_order(PSM, PromptLayout(segments=segments, layout=name, cut=cut))
    assert found is not None
    expected, _ = lay_out(PSM, prefix, suffix, len(prefix), context_segments=context)
    assert by_role(found.segments) == by_role(expected)
    assert (found.layout, found.cut) == ("psm", len(prefix))


def by_role(segments: Sequence[Segment]) -> list[tuple[object, str]]:
    """Each segment's role and text; adjacent texts of one role are one."""
    groups = groupby(segments, key=lambda one: getattr(one, "role", one))
    return [(role, "".join(one.text for one in group)) for role, group in groups]


def test_suffix_first_families_and_raw_prompts_have_no_psm_order() -> None:
    segments, name = lay_out(SEED, "abc", "xyz", 2)
    assert in_psm_order(SEED, PromptLayout(segments=segments, layout=name)) is None
    raw = (TextSegment("abc", "raw"),)
    assert in_psm_order(PSM, PromptLayout(segments=raw, layout="verbatim")) is None
