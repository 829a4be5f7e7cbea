"""Raw prompts that are the model's own template filled in are planned like any other request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import TextSegment
from midfill.infill.planner import Planner
from midfill.infill.request import InfillRequest
from midfill.infill.template import FilledTemplate, parse_template

PRE, SUF, MID = Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3)
SEPARATOR = Sentinel("<FILE>", 4)
PSM = FimFormat("psm", PRE, SUF, MID, stop=(Sentinel("<EOT>", 5),), file_separator=SEPARATOR)
SEED = FimFormat("seed", PRE, SUF, MID, order="spm")
CODESTRAL = FimFormat("codestral", PRE, SUF, None, order="spm")


@pytest.mark.parametrize(
    ("format", "prompt", "parts"),
    [
        (PSM, "<PRE>a<SUF>b<MID>", ("", "a", "b")),
        (PSM, "<PRE><SUF>b<MID>a", ("", "a", "b")),  # SPM as PSM families write it
        (PSM, "<PRE>a<SUF>b<MID>c", ("", "ac", "b")),  # an increment
        (PSM, "<s><FILE>x\n<PRE>a<SUF><MID>", ("<s><FILE>x\n", "a", "")),
        (SEED, "<SUF>b<PRE>a<MID>", ("", "a", "b")),
        (CODESTRAL, "<s><SUF>b<PRE>a", ("<s>", "a", "b")),
    ],
)
def test_a_filled_template_is_parsed(format, prompt, parts) -> None:
    assert parse_template(format, prompt) == FilledTemplate(*parts)


@pytest.mark.parametrize(
    ("format", "prompt"),
    [
        (PSM, "plain text"),
        (PSM, ""),
        (PSM, "<PRE>a<MID>b"),
        (PSM, "<SUF>b<PRE>a<MID>"),  # not this family's order
        (PSM, "<PRE>a<SUF>b"),
        (PSM, "<PRE>a<PRE><SUF>b<MID>"),  # a sentinel twice
        (PSM, "<PRE>a<SUF>b<MID>c<MID>"),
        (PSM, "<PRE>a<FILE><SUF>b<MID>"),  # another special token inside
        (PSM, "<PRE>a<SUF>b<EOT><MID>"),
        (SEED, "<PRE>a<SUF>b<MID>"),
        (SEED, "<SUF>b<PRE>a<MID>c"),
        (CODESTRAL, "<PRE>a<SUF>b"),
    ],
)
def test_any_other_prompt_is_no_template(format, prompt) -> None:
    assert parse_template(format, prompt) is None
    layout = Planner(format).plan_and_record(InfillRequest(prefix=prompt, raw=True))
    assert layout.layout == "verbatim"
    assert "".join(segment.text for segment in layout.segments) == prompt


texts = st.text(alphabet="ab<>PRESUFMID\n", max_size=12)


@settings(deadline=None)
@given(texts, texts, texts, st.sampled_from([PSM, SEED, CODESTRAL]))
def test_parsing_returns_what_was_filled_in(prefix, suffix, typed, format) -> None:
    if format is PSM:
        prompt = f"<PRE>{prefix}<SUF>{suffix}<MID>{typed}"
    else:
        typed = ""
        prompt = f"<SUF>{suffix}<PRE>{prefix}" + ("<MID>" if format is SEED else "")
    filled = parse_template(format, prompt)
    spelled_inside = any(
        name in text for name in ("<PRE>", "<SUF>", "<MID>") for text in (prefix, suffix, typed)
    )
    if not spelled_inside:
        assert filled is not None
    if filled is not None:
        assert filled.prefix + filled.suffix == prefix + typed + suffix


def test_a_client_that_fills_psm_itself_gets_a_standing_cut() -> None:
    planner = Planner(PSM)
    head = "".join(f"line {number}\n" for number in range(50))

    def prompt(text: str) -> str:
        return f"<FILE>x.py\n<PRE>{text}<SUF>{head}<MID>"

    first = planner.plan_and_record(InfillRequest(prefix=prompt(head), raw=True))
    later = planner.plan_and_record(InfillRequest(prefix=prompt(head + "typed"), raw=True))
    assert first.segments[0] == TextSegment("<FILE>x.py\n", "raw")
    assert later.document == first.document
    assert later.cut == first.cut
    assert later.planned_prefix == head + "typed"
    assert later.segments[: len(first.segments) - 1] == first.segments[:-1]


def test_layout_verbatim_does_not_parse_templates() -> None:
    request = InfillRequest(prefix="<PRE>a<SUF>b<MID>", raw=True, layout="verbatim")
    assert Planner(PSM).plan_and_record(request).segments == (TextSegment(request.prefix, "raw"),)
