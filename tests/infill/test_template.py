"""Raw prompts that are a template filled in, of any family, are planned like any other request."""

import pytest
from client_prompts import (
    CLIENT_PROMPTS,
    MELLUM,
    NEXT_EDIT_PROMPTS,
    ONE,
    PREFIX,
    SUFFIX,
    TWO,
    ClientPrompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill import template
from midfill.infill.context_files import ContextFile
from midfill.infill.formats import FAMILIES, FimFormat, Sentinel, find_format
from midfill.infill.layout import PromptLayout, TextSegment
from midfill.infill.planner import Planner
from midfill.infill.request import InfillRequest
from midfill.infill.template import (
    FilledTemplate,
    parse_template,
    read_template,
    sentinel_texts,
)

PRE, SUF, MID = Sentinel("<P>", 1), Sentinel("<S>", 2), Sentinel("<M>", 3)
SEPARATOR = Sentinel("<F>", 4)
PSM = FimFormat("psm", PRE, SUF, MID, stop=(Sentinel("<E>", 5),), file_separator=SEPARATOR)
SPM = FimFormat("spm", PRE, SUF, MID, order="spm")
NO_MIDDLE = FimFormat("no middle", PRE, SUF, None, order="spm")

FORMATS = {family.name: family for family in FAMILIES}


def own_format(name: str) -> FimFormat:
    """The format of a model of a known family."""
    family = FORMATS[name]
    texts = [family.prefix, family.suffix, family.middle, family.file_separator, family.repository]
    special_tokens = {text: number for number, text in enumerate(texts) if text}
    found = find_format(family.models[0], special_tokens, {"general.name": "".join(family.named)})
    assert found is not None
    return found


def parts(filled: FilledTemplate | None) -> tuple[object, ...] | None:
    if filled is None:
        return None
    return filled.prefix, filled.suffix, filled.context_files, filled.path, filled.repository


def spelled(layout: PromptLayout) -> str:
    return "".join(segment.text for segment in layout.segments)


def plan(format: FimFormat | None, prompt: str) -> PromptLayout:
    return Planner(format).plan_and_record(InfillRequest(prefix=prompt, raw=True))


class TestClients:
    """What each editor sends becomes prefix, suffix and files, whatever model is served."""

    @pytest.mark.parametrize("one", CLIENT_PROMPTS, ids=lambda one: one.client)
    @pytest.mark.parametrize("format", [None, PSM, own_format("seed-coder")])
    def test_the_parts_are_found(self, one: ClientPrompt, format: FimFormat | None) -> None:
        found = parts(parse_template(one.prompt, format))
        assert found == (one.prefix, one.suffix, one.context_files, one.path, one.repository)

    def test_files_in_comments_end_with_the_documents_path(self) -> None:
        files = (
            "// Path: lib/one.ts\n// const a = 1;\n// // a comment\n// Path: two.ts\n// let b;\n"
        )
        text = "// the document's own comment\n// other.ts\nlet c = "
        filled = parse_template(f"<P>{files}// src/main.ts\n{text}<S>;\n<M>", PSM)
        one = ContextFile("const a = 1;\n// a comment\n", "lib/one.ts")
        two = ContextFile("let b;\n", "two.ts")
        assert parts(filled) == (text, ";\n", (one, two), "src/main.ts", "")

    @pytest.mark.parametrize(
        "text",
        [
            "# Path: one.py\nx = 1\n",
            "# Path: one.py\n# import os\nx = ",
            "# Path: one.py\n# self.name\nx = ",
            "# Path: one.py",
            "x Path: one.py\nx main.py\n",
        ],
    )
    def test_other_comments_about_paths_are_text(self, text: str) -> None:
        assert parts(parse_template(f"<P>{text}<S>\n<M>", PSM)) == (text, "\n", (), "", "")

    @pytest.mark.parametrize("one", CLIENT_PROMPTS, ids=lambda one: one.client)
    def test_they_are_laid_out_in_the_served_models_own_format(self, one: ClientPrompt) -> None:
        repository = FimFormat("own", PRE, SUF, MID, repository=Sentinel("<R>", 6))
        layout = plan(repository, one.prompt)
        assert layout.layout in ("psm", "efim", "spm")
        assert (layout.planned_prefix, layout.planned_suffix) == (one.prefix, one.suffix)
        assert layout.template is not None
        assert layout.template in one.prompt
        context = layout.text_of("context")
        for file in one.context_files:
            assert f"{file.path}\n{file.text}" in context if file.path else file.text in context
        assert one.path in context
        assert not any(token in spelled(layout) for token in sentinel_texts() - {"<s>"})

    @pytest.mark.parametrize("one", CLIENT_PROMPTS, ids=lambda one: one.client)
    def test_a_model_without_sentinels_sees_the_prefix(self, one: ClientPrompt) -> None:
        layout = plan(None, one.prompt)
        assert (layout.layout, spelled(layout)) == ("prefix-only", one.prefix)

    @pytest.mark.parametrize("name", ["starcoder2", "qwen2.5-coder", "codellama", "codestral"])
    @pytest.mark.parametrize("one", CLIENT_PROMPTS, ids=lambda one: one.client)
    def test_the_same_holds_for_models_of_known_families(
        self, one: ClientPrompt, name: str
    ) -> None:
        found = parts(parse_template(one.prompt, own_format(name)))
        assert found == (one.prefix, one.suffix, one.context_files, one.path, one.repository)

    def test_the_known_sentinels_hold_what_the_clients_send_as_stops(self) -> None:
        texts = {"/src/", "#- coding: utf-8", "```", "</fim_middle>", "</code>", "<END>"}
        texts |= {"//", "t.", "\nt", "\n+++++ "}
        sent = {stop for one in CLIENT_PROMPTS for stop in one.stop}
        assert sent - sentinel_texts() == texts


class TestOrders:
    @pytest.mark.parametrize(
        ("format", "prompt", "prefix", "suffix"),
        [
            (PSM, "<P>a<S>b<M>", "a", "b"),
            (PSM, "<P><S>b<M>a", "a", "b"),  # SPM as prefix-first families write it
            (PSM, "<P>a<S>b<M>c", "ac", "b"),  # an increment
            (SPM, "<S>b<P>a<M>", "a", "b"),
            (SPM, "<P>a<S>b<M>", "a", "b"),  # not this family's order, but what a client meant
            (NO_MIDDLE, "<s><S>b<P>a", "a", "b"),
            (None, "<fim_suffix>b<fim_prefix>a<fim_middle>", "a", "b"),
        ],
    )
    def test_both_are_understood(self, format, prompt, prefix, suffix) -> None:
        filled = parse_template(prompt, format)
        assert filled is not None
        assert (filled.prefix, filled.suffix) == (prefix, suffix)

    def test_suffix_first_in_the_models_own_tokens_is_sent_as_it_is(self) -> None:
        """Mellum is trained so, and has StarCoder's vocabulary."""
        assert plan(own_format("starcoder"), MELLUM.prompt).layout == "verbatim"
        assert parse_template(MELLUM.prompt, own_format("qwen2.5-coder")) is not None


class TestWhatIsNoTemplate:
    @pytest.mark.parametrize(
        ("format", "prompt"),
        [
            (PSM, "plain text"),
            (PSM, ""),
            (PSM, "<P>a<M>b"),
            (PSM, "<S>b<P>a<M>"),
            (PSM, "<P>a<S>b"),
            (PSM, "<M><P>a<S>b"),
            (PSM, "<P>a<P><S>b<M>"),  # a sentinel twice
            (PSM, "<P>a<S>b<M>c<M>"),
            (SPM, "<S>b<P>a<M>c"),
            (NO_MIDDLE, "<P>a<S>b"),
        ],
    )
    def test_a_prompt_that_is_not_complete_or_not_unique(self, format, prompt) -> None:
        assert parse_template(prompt, format) is None
        layout = plan(format, prompt)
        assert (layout.layout, spelled(layout), layout.template) == ("verbatim", prompt, None)

    @pytest.mark.parametrize(
        "text",
        [
            'prompt = f"<fim_prefix>{a}<fim_suffix>{b}<fim_middle>"\nprint(pro',
            "# <|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            "See <PRE> a <SUF>b <MID>",
            "[tool]\n[SUFFIX]\nx\n[PREFIX]\ny",
            "a.py\n<|file_sep|>b\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            "<|user|>\nWhat is <|code_suffix|>a<|code_prefix|>b<|code_middle|><|assistant|>\n",
        ],
    )
    def test_source_code_that_mentions_a_whole_template(self, text: str) -> None:
        for format in (None, PSM, *map(own_format, FORMATS)):
            assert plan(format, text).layout == "verbatim"

    @pytest.mark.parametrize("prompt", NEXT_EDIT_PROMPTS.values(), ids=NEXT_EDIT_PROMPTS)
    def test_prompts_of_next_edit_models(self, prompt: str) -> None:
        for format in (None, PSM, *map(own_format, FORMATS)):
            layout = plan(format, prompt)
            assert (layout.layout, spelled(layout)) == ("verbatim", prompt)

    @pytest.mark.parametrize("prompt", ["plain text", "<P>a<M>b"])
    def test_a_raw_prompt_is_searched_once(
        self, prompt: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        request = read_template(InfillRequest(prefix=prompt, raw=True), PSM)
        assert (request.raw, request.layout) == (True, "verbatim")
        monkeypatch.setattr(template, "parse_template", None)
        assert read_template(request, PSM) is request
        assert Planner(PSM).plan_and_record(request).layout == "verbatim"

    def test_layout_verbatim(self) -> None:
        request = InfillRequest(prefix="<P>a<S>b<M>", raw=True, layout="verbatim")
        layout = Planner(PSM).plan_and_record(request)
        assert layout.segments == (TextSegment(request.prefix, "raw"),)


class TestTextsThatMentionTokens:
    """Whoever edits source code about FIM is completed, too."""

    def test_sentinels_of_another_family_are_text(self) -> None:
        about = 'TOKENS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"]\n'
        filled = parse_template(f"<fim_prefix>{about}<fim_suffix>{about}<fim_middle>", PSM)
        assert parts(filled) == (about, about, (), "", "")

    def test_the_served_models_own_tokens_are_text_in_another_familys_template(self) -> None:
        about = 'TOKENS = ["<P>", "<S>", "<M>", "<F>", "<E>"]\n'
        layout = plan(PSM, f"<fim_prefix>{about}<fim_suffix>{about}<fim_middle>")
        assert layout.planned_prefix == layout.planned_suffix == about
        assert all(
            segment.role != "raw" for segment in layout.segments if isinstance(segment, TextSegment)
        )

    def test_end_tokens_and_separators_in_the_text_are_text(self) -> None:
        about = 'ENDS = "<E>"\nFILES = "<F>"\n'
        assert parts(parse_template(f"<P>{about}<S>{about}<M>", PSM)) == (about, about, (), "", "")

    def test_a_text_that_begins_like_a_separator_is_text(self) -> None:
        xml = "<filename>a.txt</filename>\n<filename>b.txt</filename>\n"
        filled = parse_template(f"<fim_prefix>{xml}<fim_suffix><fim_middle>", None)
        assert parts(filled) == (xml, "", (), "", "")


class TestFiles:
    def test_a_bos_token_stays_if_it_is_the_models_own(self) -> None:
        layout = plan(PSM, "<s><F>x.py\nx\n<F>y.py\n<P>a<S><M>")
        assert layout.segments[0] == TextSegment("<s>", "raw")
        assert layout.text_of("context") == "x.py\nx\ny.py\n"
        assert spelled(plan(PSM, "<s><fim_prefix>a<fim_suffix>b<fim_middle>")) == "<P><S>b<M>a"

    def test_files_keep_their_place_from_prompt_to_prompt(self) -> None:
        planner = Planner(PSM)

        def ask(*files: ContextFile) -> str:
            sent = "".join(f"<F>{file.path}\n{file.text}" for file in files)
            request = InfillRequest(prefix=f"{sent}<F>c.py\n<P>a<S><M>", raw=True)
            return planner.plan_and_record(request).text_of("context")

        first = ask(ONE, TWO)
        assert ask(TWO, ONE) == first
        changed = ContextFile("import sys\n", ONE.path)
        assert ask(changed, TWO) == first  # files in a template are hints, see ``snippets``

    def test_files_of_the_request_join_those_of_the_template(self) -> None:
        request = InfillRequest(
            prefix="<F>x.py\nx\n<F>y.py\n<P>a<S><M>", raw=True, context_files=(ONE,), path="z.py"
        )
        context = Planner(PSM).plan_and_record(request).text_of("context")
        assert context == "lib/one.py\nimport os\nx.py\nx\nz.py\n"

    @pytest.mark.parametrize(
        ("first", "path"),
        [
            ("a.py", "a.py"),
            ("Makefile", "Makefile"),
            ("My Project/src/a b.py", "My Project/src/a b.py"),
            ("file:///x/y.ts", "file:///x/y.ts"),
            ("C:\\code\\x.cs", "C:\\code\\x.cs"),
            ("import os", ""),
            ("from a.b import c", ""),
            ("# a.py", ""),
            ("// src/a.py", ""),
            ("x=f(a)", ""),
            ("try:", ""),
            ("", ""),
        ],
    )
    def test_a_files_first_line_is_its_path_if_it_looks_like_one(self, first, path) -> None:
        filled = parse_template(f"<F>{first}\nx = 1\n<F>d.py\n<P>a<S><M>", PSM)
        assert filled is not None
        text = "x = 1\n" if path else f"{first}\nx = 1\n"
        assert filled.context_files == (ContextFile(text, path),)


texts = st.text(alphabet="ab<>PSM\n", max_size=12)


@settings(deadline=None)
@given(texts, texts, texts, st.sampled_from([PSM, SPM, NO_MIDDLE]))
def test_parsing_returns_what_was_filled_in(prefix, suffix, typed, format) -> None:
    if format is PSM:
        prompt = f"<P>{prefix}<S>{suffix}<M>{typed}"
    else:
        typed = ""
        prompt = f"<S>{suffix}<P>{prefix}" + ("<M>" if format is SPM else "")
    filled = parse_template(prompt, format)
    names = ("<P>", "<S>", "<M>")
    if not any(name in text for name in names for text in (prefix, suffix, typed)):
        assert filled is not None
    if filled is not None:
        assert filled.prefix + filled.suffix == prefix + typed + suffix


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [*sorted(sentinel_texts()), "+++++ ", "a.py\n", "x = 1\n", " ", "\n", "###PATH:"]
        ),
        max_size=9,
    ).map("".join)
)
def test_any_arrangement_of_tokens_is_either_planned_whole_or_sent_as_it_is(prompt) -> None:
    for format in (None, PSM, own_format("codellama"), own_format("codestral")):
        layout = plan(format, prompt)
        if layout.template is None:
            assert spelled(layout) == prompt
        else:
            assert layout.planned_prefix in prompt
            assert layout.planned_suffix in prompt


@pytest.mark.parametrize("format", [PSM, own_format("qwen2.5-coder")])
def test_a_client_that_fills_in_a_template_gets_a_standing_cut(format: FimFormat) -> None:
    planner = Planner(format)
    head = "".join(f"line {number}\n" for number in range(50))

    def prompt(text: str) -> str:
        return f"<file_sep>x.py\n<fim_prefix>{text}<fim_suffix>{head}<fim_middle>"

    first = planner.plan_and_record(InfillRequest(prefix=prompt(head), raw=True))
    later = planner.plan_and_record(InfillRequest(prefix=prompt(head + "typed"), raw=True))
    assert first.text_of("context") == "x.py\n"
    assert later.document == first.document
    assert later.cut == first.cut
    assert later.planned_prefix == head + "typed"
    assert later.segments[: len(first.segments) - 1] == first.segments[:-1]


def test_a_template_is_the_same_document_as_a_prefix_with_a_suffix() -> None:
    planner = Planner(PSM)
    plain = planner.plan_and_record(InfillRequest(prefix=PREFIX, suffix=SUFFIX))
    prompt = f"<｜fim▁begin｜>{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>"  # noqa: RUF001
    filled = planner.plan_and_record(InfillRequest(prefix=prompt, raw=True))
    assert filled.document == plain.document
    assert filled.segments == plain.segments
