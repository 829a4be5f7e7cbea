"""The planner: layouts for whole editing sessions, limits, and what it never mixes up."""

import random

import pytest
from editing import EDITS, edited_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.errors import InvalidRequestError
from midfill.infill.common_affixes import common_prefix
from midfill.infill.context_files import SHARE, ContextFile
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, TextSegment
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule

PRE, SUF, MID = Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3)
PSM = FimFormat("test", PRE, SUF, MID, stop=(PRE, SUF, MID))
SUFFIX_FIRST = FimFormat("test", PRE, SUF, None, order="spm")
REPOSITORY = FimFormat("test", PRE, SUF, MID, file_separator=Sentinel("<FILE>", 4))
TEXT = "".join(f"    value_{number} = compute({number * 7919 % 1000})\n" for number in range(300))


def spelled(layout: PromptLayout) -> str:
    """The prompt with sentinels as control characters."""
    return "".join(
        segment.text if isinstance(segment, TextSegment) else chr(segment.token_id)
        for segment in layout.segments
    )


class Session:
    """Sends requests and counts the characters no earlier prompt begins with."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.prompts: list[str] = []

    def ask(self, prefix: str, suffix: str, **fields) -> int:
        self.layout = self.planner.plan_and_record(
            InfillRequest(prefix=prefix, suffix=suffix, **fields)
        )
        prompt = spelled(self.layout)
        cost = len(prompt) - max((common_prefix(old, prompt) for old in self.prompts), default=0)
        self.prompts.append(prompt)
        return cost


class TestLayouts:
    def test_fixed_layouts_are_built_as_requested(self) -> None:
        session = Session(Planner(PSM))
        session.ask("abc", "xyz", layout="psm")
        assert spelled(session.layout) == "\1abc\2xyz\3"
        session.ask("abc", "xyz", layout="spm")
        assert spelled(session.layout) == "\1\2xyz\3abc"
        session.ask("abc", "xyz", layout="efim")
        assert spelled(session.layout) == "\1abc\2xyz\3"
        session.ask("abcd", "xyz", layout="efim")
        assert spelled(session.layout) == "\1abc\2xyz\3d"
        session.ask("ab", "xyz", layout="efim")  # a deletion past the cut
        assert spelled(session.layout) == "\1ab\2xyz\3"

    def test_a_suffix_first_model_has_only_its_own_order(self) -> None:
        session = Session(Planner(SUFFIX_FIRST))
        for layout in ("auto", "psm", "spm", "efim"):
            session.ask("abc", "xyz", layout=layout)
            assert spelled(session.layout) == "\2xyz\1abc"
            assert (session.layout.layout, session.layout.cut) == ("spm", 3)

    def test_typing_is_cheap_for_a_suffix_first_model(self) -> None:
        session = Session(Planner(SUFFIX_FIRST))
        session.ask(TEXT, TEXT)
        assert session.ask(TEXT + "typed", TEXT) == 5
        assert session.ask(TEXT[:-300], TEXT) == 0

    def test_a_model_without_sentinels_sees_the_prefix_only(self) -> None:
        layout = Planner(None).plan_and_record(InfillRequest(prefix="abc", suffix="xyz"))
        assert (spelled(layout), layout.layout) == ("abc", "prefix-only")

    def test_verbatim_prompts_are_unchanged(self) -> None:
        layout = Planner(PSM).plan_and_record(InfillRequest(prefix="a<PRE>b", layout="verbatim"))
        assert layout.segments == (TextSegment("a<PRE>b", "raw"),)

    def test_stop_tokens_come_from_the_format(self) -> None:
        assert Planner(PSM).plan_and_record(InfillRequest(prefix="a")).stop_token_ids == (1, 2, 3)

    def test_empty_texts_are_fine(self) -> None:
        assert spelled(Planner(PSM).plan_and_record(InfillRequest(prefix=""))) == "\1\2\3"
        assert spelled(Planner(None).plan_and_record(InfillRequest(prefix=""))) == ""
        assert (
            Planner(PSM).plan_and_record(InfillRequest(prefix="", layout="verbatim")).segments == ()
        )


class TestSessions:
    def test_typing_computes_what_was_typed(self) -> None:
        session = Session(Planner(PSM))
        session.ask(TEXT, TEXT)
        text = TEXT
        for typed in ("x", " = 1", "\n", "    return\n" * 20):
            text += typed
            assert session.ask(text, TEXT) == len(typed)

    def test_files_can_be_switched_back_and_forth(self) -> None:
        session = Session(Planner(PSM))
        other = TEXT.replace("value", "other")
        session.ask(TEXT, TEXT[:500])
        session.ask(other, other[:500])
        assert session.ask(TEXT + "x", TEXT[:500]) == 1
        assert session.ask(other + "x", other[:500]) == 1

    def test_a_window_costs_what_was_typed_too(self) -> None:
        session = Session(Planner(PSM))
        costs = []
        for end in range(5000, 5060):
            costs.append(session.ask(TEXT[end - 2000 : end], TEXT[7000:9000]))
        assert costs[1:] == [1] * 59

    def test_as_sent_windows_are_unchanged(self) -> None:
        planner = Planner(PSM)
        for end in (5000, 5010, 5020):
            prefix = TEXT[end - 2000 : end]
            layout = planner.plan_and_record(
                InfillRequest(prefix=prefix, suffix=TEXT[7000:9000], window="as-sent")
            )
            assert layout.planned_prefix == prefix

    def test_fragment_trained_models_get_the_increment_as_it_was_typed(self) -> None:
        planner = Planner(PSM, PlannerOptions(fragments=True))
        texts: list[str] = []
        for typed in ("", "pri", "nt(", "x"):
            texts.append(typed)
            layout = planner.plan_and_record(
                InfillRequest(prefix=TEXT + "".join(texts), suffix=TEXT)
            )
        pieces = [s.text for s in layout.segments if getattr(s, "role", "") == "increment"]
        assert pieces[-3:] == ["pri", "nt(", "x"]

    ONE, TWO = (
        ContextFile("".join(f"{name}_{n} = {n}\n" for n in range(150)), f"{name}.py")
        for name in ("one", "two")
    )

    def test_snippets_of_a_plugin_stay_while_their_document_is_cached(self) -> None:
        session = Session(Planner(PSM))
        session.ask(TEXT[:3000], TEXT[3000:4000], context_files=(self.ONE,), snippets=True)
        typed = TEXT[:3000] + "ty"
        for offered in ((self.TWO, self.ONE), (self.TWO,), (), (self.ONE,)):
            assert session.ask(typed, TEXT[3000:4000], context_files=offered, snippets=True) <= 2
            assert session.layout.text_of("context").startswith("# one.py\none_0 = 0\n")
        assert (
            session.ask(typed, TEXT[3000:4000], context_files=(self.TWO,)) > 4000
        )  # a user's own file
        assert session.layout.text_of("context").startswith("# two.py\n")

    def test_a_document_that_was_not_cached_shows_the_newest_snippets(self) -> None:
        session, other = Session(Planner(PSM)), TEXT.replace("value", "other")
        for number in range(40):  # what snippets may cost is a share of this
            session.ask(TEXT[: 9000 - 200 * number], TEXT[-4000:], snippets=True)
        session.ask(other, "", context_files=(self.ONE,), snippets=True)
        assert session.layout.text_of("context").startswith("# one.py\n")
        third = TEXT.replace("value", "third")
        session.ask(third, "", context_files=(self.TWO,), snippets=True)
        assert session.layout.text_of("context").startswith("# two.py\n")

    def test_announced_snippets_are_prepared_with_the_document_edited_last(self) -> None:
        session, options = Session(Planner(PSM)), {"snippets": True}
        for number in range(40):
            session.ask(TEXT[: 9000 - 200 * number], TEXT[-4000:], **options)
        prefix, suffix = TEXT[:2000], TEXT[3000:3500]
        session.ask(prefix, suffix, context_files=(self.ONE,), **options)
        announced = InfillRequest(prefix="", context_files=(self.ONE, self.TWO), snippets=True)
        expected = session.planner.expected_with_snippets(announced)
        assert expected is not None
        assert expected.planned_prefix == prefix
        assert spelled(expected).index("two_0 = 0") > spelled(expected).index("one_0 = 0")
        session.planner.record_computed(expected)
        session.prompts.append(spelled(expected))
        assert session.planner.expected_with_snippets(announced) is None
        assert (
            session.ask(f"{prefix}ty", suffix, context_files=announced.context_files, **options)
            == 2
        )
        assert "two_0 = 0" in spelled(session.layout)

    def test_announced_snippets_stand_alone_without_a_document(self) -> None:
        planner = Planner(PSM)
        planner.plan_and_record(InfillRequest(prefix=TEXT, tenant="other"))
        announced = InfillRequest(
            prefix="", context_files=(ContextFile("one = 1\n", "a.py"),), snippets=True
        )
        expected = planner.expected_with_snippets(announced)
        assert expected is not None
        assert spelled(expected) == "\1# a.py\none = 1\n\2\3"
        planner.record_computed(expected)  # no document's state changes

    @pytest.mark.parametrize("format", [PSM, REPOSITORY])
    def test_a_ring_that_always_turns_costs_a_session_its_share(self, format: FimFormat) -> None:
        allowance = 2000
        options = PlannerOptions(
            window=WindowRule(before=1200, after=400), snippet_characters=allowance
        )

        def cost(*, ring: bool) -> int:
            chance, session, total = random.Random(1), Session(Planner(format, options)), 0
            text, caret, shown = TEXT, 4000, set()
            for turn in range(400):
                if chance.random() < 0.3:
                    caret = chance.randrange(len(text))
                text, caret = f"{text[:caret]}typed{text[caret:]}", caret + 5
                chunks = tuple(
                    ContextFile("".join(f"c{n}_{row} = {row}\n" for row in range(60)), "c.py")
                    for n in range(turn, turn + 4)
                )
                context = chunks if ring else ()
                total += session.ask(
                    text[:caret], text[caret:], context_files=context, snippets=True
                )
                shown.add(session.layout.text_of("context"))
            assert len(shown) > 2 * ring
            return total

        without = cost(ring=False)
        later = 2 * 1600  # what the last change costs where the caret comes back to
        assert without < cost(ring=True) < (1 + SHARE) * without + allowance + later

    def test_an_expected_layout_is_cheap_once_it_is_computed(self) -> None:
        session = Session(Planner(PSM))
        session.ask(TEXT, TEXT)
        typed = TEXT + "x = 1\n" * 300
        session.ask(typed, TEXT)
        document = session.layout.document
        assert document is not None
        expected = session.planner.expected_layout(document)
        assert expected is not None
        assert expected.planned_prefix == typed
        assert expected.planned_suffix == TEXT
        session.prompts.append(spelled(expected))
        session.planner.record_computed(expected)
        assert session.planner.expected_layout(document) is None
        assert session.ask(typed + "y", TEXT) == 1
        assert len(session.layout.text_of("increment")) < 464
        assert session.planner.expected_layout("no such document") is None

    def test_a_changed_context_gives_up_the_cut(self) -> None:
        session = Session(Planner(REPOSITORY))
        fields = {"path": "b.py"}
        session.ask(TEXT, TEXT, context_files=(ContextFile("x = 1\n", "a.py"),), **fields)
        typed = TEXT + "y = 2\n" * 100
        assert (
            session.ask(typed, TEXT, context_files=(ContextFile("x = 1\n", "a.py"),), **fields)
            == 600
        )
        session.ask(typed, TEXT, context_files=(ContextFile("x = 2\n", "a.py"),), **fields)
        assert len(session.layout.text_of("increment")) < 464


class TestWindows:
    """A client sends the whole of a long document with every request."""

    LONG = "".join(
        f"def function_{n}(x):\n    value = x + {n * 7919 % 1000}\n    return value\n\n\n"
        for n in range(1500)
    )
    RULE = WindowRule(before=1200, after=400)

    def session(self, format: FimFormat | None = PSM) -> Session:
        return Session(Planner(format, PlannerOptions(window=self.RULE)))

    def ask(self, session: Session, caret: int, typed: str = "", **fields) -> int:
        return session.ask(self.LONG[:caret] + typed, self.LONG[caret:], **fields)

    @pytest.mark.parametrize("format", [PSM, SUFFIX_FIRST, REPOSITORY, None])
    @pytest.mark.parametrize("layout", ["auto", "psm", "spm", "efim"])
    def test_every_layout_shows_a_window(self, format, layout) -> None:
        session = self.session(format)
        for caret in (0, 40_000, len(self.LONG)):
            self.ask(session, caret, layout=layout)
            assert len(spelled(session.layout)) < 1.25 * 1200 + 400 + 4
            assert self.LONG[:caret].endswith(session.layout.planned_prefix)
            assert self.LONG[caret:].startswith(session.layout.planned_suffix)

    def test_what_was_sent_can_be_asked_for(self) -> None:
        session = self.session()
        self.ask(session, 40_000, window="as-sent")
        assert session.layout.planned_prefix + session.layout.planned_suffix == self.LONG

    def test_a_request_can_bring_its_own_rule(self) -> None:
        session = self.session()
        self.ask(session, 40_000, window=WindowRule(before=8000, after=100))
        assert 6000 <= len(session.layout.planned_prefix) <= 10_000
        assert 50 <= len(session.layout.planned_suffix) <= 100

    def test_a_document_within_the_rule_is_shown_whole(self) -> None:
        session = self.session()
        session.ask(self.LONG[:1500], self.LONG[1500:1900])
        assert session.layout.planned_prefix == self.LONG[:1500]
        assert session.layout.planned_suffix == self.LONG[1500:1900]

    def test_typing_in_a_long_document_computes_what_was_typed(self) -> None:
        session = self.session()
        self.ask(session, 40_000)
        typed = ""
        for new in ("x", " = 1", "\n", "    return\n" * 20):
            typed += new
            assert self.ask(session, 40_000, typed) == len(new)

    def test_a_caret_moved_by_a_line_computes_the_suffix_and_the_increment(self) -> None:
        session = self.session()
        cold = self.ask(session, 40_000)
        costs = [self.ask(session, 40_000 + 30 * step) for step in range(1, 15)]
        assert max(costs) < 0.9 * cold
        assert sorted(costs)[7] <= 400 + 2 * 400

    def test_a_caret_that_comes_back_finds_its_prompt(self) -> None:
        session = self.session()
        for caret in (40_000, 60_000, 20_000):
            self.ask(session, caret)
        assert self.ask(session, 40_000, "x") == 1

    def test_an_edit_far_from_the_caret_costs_nothing(self) -> None:
        session = self.session()
        self.ask(session, 40_000)
        head, tail = "import os\n" + self.LONG[:40_000], self.LONG[40_000:] + "print(1)\n"
        assert session.ask(head + "x", tail) == 1

    def test_where_the_window_hops_the_cut_is_placed_as_in_a_new_document(self) -> None:
        session = self.session()
        self.ask(session, 40_000)
        hops, length, typed = 0, 0, ""
        for number in range(1000, 1300):
            typed += f"    value = {number} + x\n"
            self.ask(session, 40_000, typed)
            if len(session.layout.planned_prefix) < length:
                hops += 1
                assert 400 <= len(session.layout.text_of("increment")) <= 425
            length = len(session.layout.planned_prefix)
        assert hops == 2

    def test_a_client_that_sends_a_larger_window_gets_ours(self) -> None:
        session = self.session()
        costs = []
        for end in range(40_000, 40_060):
            costs.append(session.ask(self.LONG[end - 9000 : end], self.LONG[60_000:69_000]))
            assert len(session.layout.planned_prefix) <= 1700
        assert costs[1:] == [1] * 59

    @pytest.mark.parametrize("format", [PSM, SUFFIX_FIRST])
    def test_a_hop_that_was_computed_in_idle_time_costs_nothing(self, format) -> None:
        session = self.session(format)
        self.ask(session, 40_000)
        typed, expected = "", None
        while expected is None or len(expected.planned_prefix) > 1500:
            typed += "    x = 1\n"
            assert self.ask(session, 40_000, typed) == len("    x = 1\n")
            assert session.layout.document is not None
            expected = session.planner.expected_layout(session.layout.document)
        session.prompts.append(spelled(expected))
        session.planner.record_computed(expected)
        assert self.ask(session, 40_000, typed + "y") == 1
        assert session.layout.planned_prefix == expected.planned_prefix + "y"

    def test_a_limit_is_remembered(self) -> None:
        session = self.session()
        prefix, suffix = self.LONG[:40_000], self.LONG[40_000:]
        request = InfillRequest(prefix=prefix, suffix=suffix)
        session.planner.plan_and_record(request, 500)
        for _ in range(50):
            prefix += "    x = 1\n"
            request = InfillRequest(prefix=prefix, suffix=suffix)
            layout = session.planner.plan_and_record(request)
            assert len(layout.planned_prefix) + len(layout.planned_suffix) <= 500


class TestBadInput:
    @pytest.mark.parametrize("field", ["prefix", "suffix"])
    def test_lone_surrogates_are_refused_by_name(self, field: str) -> None:
        texts = {"prefix": "a", "suffix": "b"} | {field: "é\ud83d"}
        with pytest.raises(InvalidRequestError, match="half a surrogate pair") as raised:
            Planner(PSM).plan_and_record(InfillRequest(**texts))
        assert raised.value.param == {"prefix": "prompt", "suffix": "suffix"}[field]

    def test_texts_past_the_limit_are_refused_by_name(self) -> None:
        with pytest.raises(InvalidRequestError, match="at most 4000000") as raised:
            Planner(PSM).plan_and_record(InfillRequest(prefix="a", suffix="x" * 10_000_000))
        assert raised.value.param == "suffix"

    def test_a_raw_prompt_takes_no_suffix(self) -> None:
        for fields in ({"layout": "verbatim"}, {"raw": True}):
            with pytest.raises(InvalidRequestError, match="takes no suffix"):
                Planner(PSM).plan_and_record(InfillRequest(prefix="a", suffix="b", **fields))

    def test_nul_bytes_and_sentinel_spellings_are_plain_text(self) -> None:
        prefix, suffix = "a\0<PRE><SUF>", "<MID>\0b"
        layout = Planner(PSM).plan_and_record(InfillRequest(prefix=prefix, suffix=suffix))
        assert spelled(layout) == f"\1\2{suffix}\3{prefix}"
        assert all(s.role != "raw" for s in layout.segments if isinstance(s, TextSegment))


class TestIsolation:
    def test_no_text_of_one_tenant_reaches_another(self) -> None:
        """Windows on the same file: the neighbour's remembered text must never be used."""
        planner = Planner(PSM)
        for end in range(5000, 5200, 10):
            planner.plan_and_record(
                InfillRequest(prefix=TEXT[end - 2000 : end], suffix=TEXT[end:6000], tenant="a")
            )
        layout = planner.plan_and_record(
            InfillRequest(prefix=TEXT[3400:5200], suffix=TEXT[5200:6000], tenant="b")
        )
        assert layout.planned_prefix == TEXT[3400:5200]

    def test_a_wrong_name_changes_no_text(self) -> None:
        planner = Planner(PSM)
        other = TEXT.replace("value", "other")
        for text in (TEXT, other, TEXT):
            layout = planner.plan_and_record(
                InfillRequest(prefix=text[:4000], suffix=text[4000:], document="same.py")
            )
            assert layout.planned_prefix + layout.planned_suffix == text


@settings(max_examples=100, deadline=None)
@given(EDITS, st.sampled_from([PSM, SUFFIX_FIRST]), st.booleans())
def test_every_prompt_of_every_session_holds_exactly_the_document(steps, format, fragments) -> None:
    """Whole documents: whatever is edited, prefix and suffix come through, segment by segment."""
    planner = Planner(format, PlannerOptions(fragments=fragments, max_document_bytes=40_000))
    for prefix, suffix in edited_texts(TEXT[:3000], steps):
        layout = planner.plan_and_record(InfillRequest(prefix=prefix, suffix=suffix))
        if format is PSM:
            head, increment = prefix[: layout.cut], prefix[layout.cut :]
            assert spelled(layout) == f"\1{head}\2{suffix}\3{increment}"
        else:
            assert spelled(layout) == f"\2{suffix}\1{prefix}"
        assert all(segment.text for segment in layout.segments)


def test_many_tenants_at_once_each_get_their_own_text() -> None:
    planner = Planner(PSM, PlannerOptions(max_document_bytes=200_000))
    chance = random.Random(0)
    texts = {str(user): TEXT.replace("value", f"user{user}") for user in range(40)}
    for _ in range(400):
        user = str(chance.randrange(40))
        caret = chance.randrange(3000, 6000)
        prefix, suffix = texts[user][caret - 1500 : caret], texts[user][caret : caret + 1500]
        layout = planner.plan_and_record(InfillRequest(prefix=prefix, suffix=suffix, tenant=user))
        assert layout.planned_prefix in texts[user]
        assert layout.planned_suffix in texts[user]
        assert planner._documents.held_bytes <= 200_000


class TestFindingDocuments:
    def test_the_document_of_a_later_state_is_found(self) -> None:
        planner = Planner(PSM)
        layout = planner.plan_and_record(InfillRequest(prefix=TEXT[:900], suffix=TEXT[900:2000]))
        edited = InfillRequest(prefix=TEXT[:900] + "x = 1", suffix=TEXT[900:2000])
        assert planner.find_document(edited) == layout.document

    def test_another_text_and_another_tenants_are_new(self) -> None:
        planner = Planner(PSM)
        planner.plan_and_record(InfillRequest(prefix=TEXT[:900], suffix=TEXT[900:2000]))
        other = InfillRequest(prefix="import this\n" * 50, suffix="")
        assert planner.find_document(other) is None
        same = InfillRequest(prefix=TEXT[:900], suffix=TEXT[900:2000], tenant="b")
        assert planner.find_document(same) is None

    def test_a_raw_prompt_is_of_no_document(self) -> None:
        assert Planner(PSM).find_document(InfillRequest(prefix=TEXT, raw=True)) == ""
        fixed = InfillRequest(prefix=TEXT, suffix="a", layout="psm")
        assert Planner(PSM).find_document(fixed) == ""

    def test_looking_changes_nothing(self) -> None:
        looked, plain = Planner(PSM), Planner(PSM)
        for caret in (500, 900, 300, 1500):
            request = InfillRequest(prefix=TEXT[:caret], suffix=TEXT[caret:3000])
            looked.find_document(request)
            a, b = (planner.plan_and_record(request) for planner in (looked, plain))
            assert spelled(a) == spelled(b)
