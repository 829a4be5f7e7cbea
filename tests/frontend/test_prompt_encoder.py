"""PromptEncoder: token ids for each kind of prompt."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from midfill.errors import InvalidRequestError, OptionError
from midfill.frontend.chat import ChatTemplate
from midfill.frontend.prompt import Prompt, PromptAnswer
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.context_files import ContextFile
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.models.checkpoints.checkpoint import EMPTY_THRESHOLD_KEY, Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint

CONTEXT = 100


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


@pytest.fixture
def prompts(checkpoint: Checkpoint) -> PromptEncoder:
    return PromptEncoder(checkpoint, fim_format(checkpoint), CONTEXT)


def special(checkpoint: Checkpoint, *names: str) -> list[int]:
    return [checkpoint.tokenizer.special_tokens[name] for name in names]


def test_special_tokens_are_parsed_in_a_raw_prompt(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    ids = prompts.raw("<fim_prefix>a<fim_suffix>").token_ids
    pre, suf = special(checkpoint, "<fim_prefix>", "<fim_suffix>")
    assert ids == [pre, *checkpoint.tokenizer.encode("a"), suf]


def test_a_filled_in_template_is_planned_like_any_document(prompts: PromptEncoder) -> None:
    suffix = "\nprint(f(1))\n"
    infilled = prompts.infill(InfillRequest(prefix="def f(x):", suffix=suffix))
    raw = prompts.raw(f"<fim_prefix>def f(x): r<fim_suffix>{suffix}<fim_middle>")
    assert infilled.report is not None
    assert raw.report is not None
    assert raw.report.layout == "spm"
    assert raw.report.document == infilled.report.document


def test_special_tokens_are_not_parsed_around_a_caret(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    request = InfillRequest(prefix="a<fim_suffix>b", suffix="<fim_middle>", layout="psm")
    prompt = prompts.infill(request)
    pre, suf, mid = special(checkpoint, "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    encode = checkpoint.tokenizer.encode
    expected = [pre, *encode("a<fim_suffix>b"), suf, *encode("<fim_middle>"), mid]
    assert prompt.token_ids == expected
    assert prompt.report is not None
    assert (prompt.report.layout, prompt.report.cut) == ("psm", len(request.prefix))
    assert set(special(checkpoint, "<fim_prefix>", "<|endoftext|>")) <= set(prompt.stop_token_ids)


class TestPredictions:
    PREFIX, SUFFIX = "x = 1\ny = pri", "\nz = 3\n"

    def ask(self, prompts: PromptEncoder, typed: str = "", **options: Any) -> Prompt:
        return prompts.infill(
            InfillRequest(prefix=self.PREFIX + typed, suffix=self.SUFFIX), **options
        )

    def answer(self, prompts: PromptEncoder, checkpoint: Checkpoint, text: str) -> None:
        """Record an answer of that text, with what it has to begin with."""
        prompt = self.ask(prompts)
        written = prompt.begins_with.decode() + text
        tokens = checkpoint.tokenizer.encode_continuation(written)
        prompts.record_answers([PromptAnswer(prompt, tokens)])

    def test_the_rest_of_the_last_answer_is_predicted(
        self, prompts: PromptEncoder, checkpoint: Checkpoint
    ) -> None:
        assert self.ask(prompts).prediction == ()
        self.answer(prompts, checkpoint, "nt(x)")
        for typed, rest in (("", "nt(x)"), ("n", "t(x)"), ("nt(", "x)")):
            prompt = self.ask(prompts, typed)
            predicted = checkpoint.tokenizer.decode(prompt.prediction)
            assert predicted == prompt.begins_with.decode() + rest
            plain = self.ask(prompts, typed, healing=False)
            assert checkpoint.tokenizer.decode(plain.prediction) == rest
        assert self.ask(prompts, "ce").prediction == ()

    def test_it_ends_as_the_answer_did(
        self, prompts: PromptEncoder, checkpoint: Checkpoint
    ) -> None:
        prompt = self.ask(prompts, healing=False)
        (end,) = special(checkpoint, "<|endoftext|>")
        tokens = [*checkpoint.tokenizer.encode("nt"), end]
        prompts.record_answers([PromptAnswer(prompt, tokens)])
        assert self.ask(prompts, healing=False).prediction[-1] == end

    def test_an_answer_that_ended_before_it_had_text_predicts_nothing(
        self, prompts: PromptEncoder, checkpoint: Checkpoint
    ) -> None:
        prompt = self.ask(prompts)
        tokens = checkpoint.tokenizer.encode("p")
        prompts.record_answers([PromptAnswer(prompt, []), PromptAnswer(prompt, tokens)])
        assert self.ask(prompts).prediction == ()

    def test_characters_that_are_not_whole_are_left_out(
        self, prompts: PromptEncoder, checkpoint: Checkpoint
    ) -> None:
        prompt = self.ask(prompts, healing=False)
        ids = checkpoint.tokenizer.encode("a\N{SLIGHTLY SMILING FACE}")
        prompts.record_answers([PromptAnswer(prompt, ids[:-1])])
        again = self.ask(prompts, healing=False)
        assert checkpoint.tokenizer.decode(again.prediction) == "a"

    def test_raw_prompts_have_none(self, prompts: PromptEncoder, checkpoint: Checkpoint) -> None:
        prompt = prompts.raw("x = ")
        prompts.record_answers([PromptAnswer(prompt, checkpoint.tokenizer.encode("1"))])
        assert prompts.raw("x = ").prediction == ()


class TestTheThresholdOfEmptyAnswers:
    REQUEST = InfillRequest(prefix="a = ", suffix="\nb\n")

    @pytest.fixture
    def prompts(self, checkpoint: Checkpoint, tiny_folder: Path) -> PromptEncoder:
        says = open_checkpoint(tiny_folder)
        says.metadata = {**says.metadata, EMPTY_THRESHOLD_KEY: 0.2}
        return PromptEncoder(says, fim_format(says), CONTEXT)

    def test_the_clients_counts_before_the_models(self, prompts: PromptEncoder) -> None:
        prompt = prompts.infill(self.REQUEST)
        for asked, expected in ((None, 0.2), (0.0, 0.0), (0.3, 0.3), (1, 1.0)):
            request = prompt.with_empty_threshold(asked).request("1", SamplingParams())
            assert request.empty_threshold == expected

    def test_text_that_is_asked_for_in_any_case_has_none(self, prompts: PromptEncoder) -> None:
        prompt = prompts.infill(self.REQUEST).with_empty_threshold(0.3)
        assert prompt.request("1", SamplingParams(ignore_eos=True)).empty_threshold == 0.0

    def test_raw_prompts_and_token_ids_have_none(self, prompts: PromptEncoder) -> None:
        for prompt in (prompts.raw("a = "), prompts.tokens([5, 6])):
            assert prompt.request("1", SamplingParams()).empty_threshold == 0.0
            with pytest.raises(InvalidRequestError, match="needs a suffix, or a prompt that is"):
                prompt.with_empty_threshold(0.3)

    def test_a_filled_in_template_has_one(self, prompts: PromptEncoder) -> None:
        prompt = prompts.raw("<fim_prefix>a = <fim_suffix>\nb\n<fim_middle>")
        assert prompt.request("1", SamplingParams()).empty_threshold == 0.2
        assert prompt.with_empty_threshold(0.0).empty_threshold == 0.0

    @pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan")])
    def test_it_is_a_probability(self, prompts: PromptEncoder, wrong: float) -> None:
        with pytest.raises(InvalidRequestError, match="must be a number from 0 to 1") as raised:
            prompts.infill(self.REQUEST).with_empty_threshold(wrong)
        assert raised.value.param == "empty_threshold"


class TestOpenedLines:
    REQUEST = InfillRequest(prefix="def f():\n", suffix="    return x\n", open_line=True)

    def test_the_model_sees_a_line_break_before_the_suffix(
        self, prompts: PromptEncoder, checkpoint: Checkpoint
    ) -> None:
        opened = prompts.infill(self.REQUEST)
        assert opened.line_break == "\n"
        assert opened.suffix == "\n    return x\n"
        as_sent = InfillRequest(prefix="def f():\n", suffix="\n    return x\n")
        other = PromptEncoder(checkpoint, prompts.format, CONTEXT)
        assert opened.token_ids == other.infill(as_sent).token_ids

    @pytest.mark.parametrize("open_line", [False, None])
    def test_it_does_not_unless_the_model_or_the_client_asks_for_it(
        self, prompts: PromptEncoder, open_line: bool | None
    ) -> None:
        request = dataclasses.replace(self.REQUEST, open_line=open_line)
        assert prompts.infill(request).line_break == ""

    def test_carets_in_templates_are_carets(self, prompts: PromptEncoder) -> None:
        template = "<fim_prefix>def f():\n<fim_suffix>    return x\n<fim_middle>"
        request = InfillRequest(prefix=template, raw=True, open_line=True)
        prompt = prompts.infill(request)
        assert (prompt.line_break, prompt.suffix) == ("\n", "\n    return x\n")

    def test_a_model_that_does_not_see_the_suffix_opens_none(self, checkpoint: Checkpoint) -> None:
        prompt = PromptEncoder(checkpoint, None, CONTEXT).infill(self.REQUEST)
        assert prompt.line_break == ""

    @pytest.mark.parametrize(
        "change",
        [{"raw": True, "suffix": ""}, {"layout": "verbatim", "suffix": ""}, {"prefix": "def f"}],
    )
    def test_raw_prompts_and_other_carets_are_left_alone(
        self, prompts: PromptEncoder, change: dict[str, Any]
    ) -> None:
        prompt = prompts.infill(dataclasses.replace(self.REQUEST, **change))
        assert prompt.line_break == ""


def test_a_model_without_sentinels_sees_the_prefix_and_says_so(checkpoint: Checkpoint) -> None:
    prompt = PromptEncoder(checkpoint, None, CONTEXT).infill(InfillRequest(prefix="ab", suffix="c"))
    assert prompt.token_ids == checkpoint.tokenizer.encode("ab")
    assert prompt.report is not None
    assert not prompt.report.sentinels
    assert prompt.report.layout == "prefix-only"


def test_token_ids_are_sent_as_they_are(prompts: PromptEncoder) -> None:
    assert prompts.tokens([5, 0, 7]).token_ids == [5, 0, 7]


@pytest.mark.parametrize("bad", [-1, 320, 10**40])
def test_unknown_token_ids_are_refused(prompts: PromptEncoder, bad: int) -> None:
    with pytest.raises(InvalidRequestError, match="token id") as raised:
        prompts.tokens([1, bad])
    assert raised.value.param == "prompt"


def test_empty_prompts_are_refused(prompts: PromptEncoder) -> None:
    for make in (lambda: prompts.raw(""), lambda: prompts.tokens([])):
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            make()


def test_an_empty_document_can_be_filled_in(prompts: PromptEncoder, checkpoint: Checkpoint) -> None:
    prompt = prompts.infill(InfillRequest(prefix="", suffix=""))
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert prompt.token_ids == special(checkpoint, *names)


@pytest.mark.parametrize("length", [CONTEXT, 10_000_000])
def test_a_prompt_that_fills_the_context_is_refused(prompts: PromptEncoder, length: int) -> None:
    with pytest.raises(InvalidRequestError, match="context") as raised:
        prompts.raw("ab" * length)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"


def test_a_growing_prefix_keeps_its_cut(prompts: PromptEncoder) -> None:
    first = prompts.infill(InfillRequest(prefix="def f(x):", suffix="\nprint(f(1))\n"))
    later = prompts.infill(InfillRequest(prefix="def f(x): ret", suffix="\nprint(f(1))\n"))
    assert later.report is not None
    assert first.report is not None
    assert later.report.document == first.report.document
    assert later.report.layout == "spm"
    assert later.report.cut == first.report.cut
    pairs = zip(first.token_ids, later.token_ids, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert len(later.token_ids) - shared < len(first.token_ids) // 2


def test_remembered_text_never_makes_a_prompt_too_long(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    line = "".join(map(chr, range(0x4E00, 0x4E00 + 40)))  # three tokens a character
    first = prompts.infill(InfillRequest(prefix=line[:28]))
    moved = prompts.infill(InfillRequest(prefix=line[12:]))
    assert len(checkpoint.tokenizer.encode(line)) > CONTEXT
    assert len(moved.token_ids) == len(first.token_ids) < CONTEXT


LONG = "".join(f"value_{n} = compute({n * 7919 % 1000})\n" for n in range(2000))


class TestLongDocuments:
    def ask(self, prompts: PromptEncoder, text: str, caret: int, **fields: Any) -> Prompt:
        return prompts.infill(InfillRequest(prefix=text[:caret], suffix=text[caret:], **fields))

    def test_every_caret_gets_a_prompt_that_leaves_room_for_an_answer(
        self, prompts: PromptEncoder
    ) -> None:
        for caret in (0, 1, 777, 30_000, len(LONG) - 1, len(LONG)):
            prompt = self.ask(prompts, LONG, caret)
            assert len(prompt.token_ids) <= 0.875 * CONTEXT
            assert prompt.report is not None
            assert prompt.report.window is not None
            before, after = prompt.report.window
            assert before or not caret
            assert after or caret == len(LONG)
            assert (prompt.prefix, prompt.suffix) == (LONG[:caret], LONG[caret:])

    def test_text_of_many_tokens_gets_a_smaller_window(self, checkpoint: Checkpoint) -> None:
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 1000, WindowRule(600, 200))
        dense = "".join(map(chr, range(0x4E00, 0x4E00 + 5000)))  # three tokens a character
        sizes = []
        for text in (LONG, dense):
            prompt = self.ask(prompts, text, 2500)
            assert prompt.report is not None
            assert len(prompt.token_ids) <= 875
            sizes.append(prompt.report.window)
        (code, _), (chinese, after) = sizes
        assert chinese < code / 2
        assert after > 0

    def test_a_smaller_window_stands_too(self, checkpoint: Checkpoint) -> None:
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 1000, WindowRule(600, 200))
        dense = "".join(map(chr, range(0x4E00, 0x4E00 + 5000)))
        first = self.ask(prompts, dense, 2500).token_ids
        for typed in ("x", "xy", "xyz"):
            text = dense[:2500] + typed + dense[2500:]
            assert self.ask(prompts, text, 2500 + len(typed)).token_ids[:300] == first[:300]

    def test_a_request_may_ask_for_all_that_fits(self, checkpoint: Checkpoint) -> None:
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 1000)
        most = WindowRule(before=3_000_000, after=1_000_000)
        assert 450 <= len(self.ask(prompts, LONG, 30_000, window=most).token_ids) <= 875

    def test_as_sent_is_refused_where_it_does_not_fit(self, prompts: PromptEncoder) -> None:
        with pytest.raises(InvalidRequestError, match="context") as raised:
            self.ask(prompts, LONG, 30_000, window="as-sent")
        assert raised.value.code == "context_length_exceeded"

    def test_a_document_that_fits_gets_the_prompt_it_has_as_sent(
        self, checkpoint: Checkpoint
    ) -> None:
        format, rule = fim_format(checkpoint), WindowRule(600, 200)
        for caret in (0, 40, 600):
            as_sent = PromptEncoder(checkpoint, format, 1000)
            planned = PromptEncoder(checkpoint, format, 1000, rule)
            text = LONG[: caret + 200]
            expected = self.ask(as_sent, text, caret, window="as-sent").token_ids
            assert self.ask(planned, text, caret).token_ids == expected


def test_an_unfinished_word_is_removed_for_the_answer_to_write(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    tokenizer = checkpoint.tokenizer
    for prefix in ("a: Var", "self.toke", "x = 1\n  ", "größe = de"):
        request = InfillRequest(prefix=prefix, suffix="\n", layout="spm")
        plain = prompts.infill(request, healing=False)
        healed = prompts.infill(request)
        removed = plain.token_ids[len(healed.token_ids) :]
        assert plain.begins_with == b""
        assert plain.token_ids[: len(healed.token_ids)] == healed.token_ids
        assert removed
        assert b"".join(map(tokenizer.token_bytes, removed)) == healed.begins_with
        assert prefix.encode().endswith(healed.begins_with)
        assert healed.text == prefix
        assert healed.report is not None
        assert healed.report.healed == len(healed.begins_with)


@pytest.mark.parametrize("field", ["role", "content", "name"])
def test_each_field_of_a_message_counts_before_it_is_rendered(
    prompts: PromptEncoder, checkpoint: Checkpoint, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTemplate, "encode", None)  # not reached
    most = prompts.context * checkpoint.tokenizer.longest_token()
    message = {"role": "", "content": "", field: "x" * (most + 1)}
    with pytest.raises(InvalidRequestError, match=f"messages has {most + 1} characters"):
        prompts.chat([message])


def test_what_a_template_makes_of_messages_counts_before_it_is_tokenised(
    prompts: PromptEncoder, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = prompts.context * checkpoint.tokenizer.longest_token()
    source = "{% for n in range(2) %}{{ messages[0].content }}{% endfor %}"
    chat = ChatTemplate(source, checkpoint.tokenizer, {})
    monkeypatch.setattr(prompts, "_chat", chat)
    with pytest.raises(InvalidRequestError, match=f"messages has {2 * most} characters"):
        prompts.chat([{"role": "", "content": "x" * most}])


def test_only_text_before_the_caret_is_healed(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    template = "<fim_prefix>a = 1\n<fim_suffix>x<fim_middle>"
    for prompt in (
        prompts.raw("a = tok"),
        prompts.infill(InfillRequest(prefix=f"{template}tok", layout="verbatim")),
        prompts.tokens(checkpoint.tokenizer.encode("a = tok")),
        prompts.chat([{"role": "user", "content": "tok"}]),
        prompts.infill(InfillRequest(prefix="a = tok", suffix="x", layout="psm")),  # ends in MID
        prompts.infill(InfillRequest(prefix="", suffix="tok", layout="spm")),
    ):
        assert prompt.begins_with == b""
    typed = prompts.raw(f"{template}{'b = 2; ' * 6}llam")  # planned, the text after MID is typed
    assert typed.begins_with


def test_healing_never_leaves_an_empty_prompt(checkpoint: Checkpoint) -> None:
    prompts = PromptEncoder(checkpoint, None, CONTEXT)
    assert len(checkpoint.tokenizer.encode("to")) == 1
    only = prompts.infill(InfillRequest(prefix="to", suffix=""))
    assert (len(only.token_ids), only.begins_with) == (1, b"")
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        prompts.infill(InfillRequest(prefix="", suffix="x"))


def test_context_precedes_the_document_and_changed_files_follow_unchanged_ones(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    def ask(*files: ContextFile) -> str:
        request = InfillRequest(
            prefix="p = ", suffix="\n", context_files=files, path="d.py", layout="spm"
        )
        return checkpoint.tokenizer.decode(prompts.infill(request, healing=False).token_ids)

    one, two = ContextFile("A = 1\n", "a.py"), ContextFile("B = 2\n", "b.py")
    assert ask(one, two) == "# a.py\nA = 1\n# b.py\nB = 2\n# d.py\n\np = "
    changed = ContextFile("A = 3\n", "a.py")
    assert ask(changed, two) == "# b.py\nB = 2\n# a.py\nA = 3\n# d.py\n\np = "


@pytest.mark.parametrize("length", [CONTEXT, 10_000_000])
def test_files_that_fill_the_context_are_named_in_the_error(
    prompts: PromptEncoder, length: int
) -> None:
    context = (ContextFile("ab" * length, "a.py"),)
    with pytest.raises(InvalidRequestError, match=r"^context") as raised:
        prompts.infill(InfillRequest(prefix="a", suffix="b", context_files=context))
    assert raised.value.param == "context"
    assert raised.value.code == "context_length_exceeded"
    prompts.infill(InfillRequest(prefix="a", suffix="b"))


def test_after_deletions_close_to_the_cut_another_cut_is_expected(checkpoint: Checkpoint) -> None:
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
    prefix, suffix = "a = 1\nb = 2\n" * 100, "c\n"
    first = prompts.infill(InfillRequest(prefix=prefix, suffix=suffix))
    assert first.report is not None
    assert first.report.cut is not None
    assert first.report.document is not None
    assert prompts.expected_prompt(first.report.document) is None
    prompts.infill(InfillRequest(prefix=prefix[: first.report.cut + 202], suffix=suffix))
    expected = prompts.expected_prompt(first.report.document)
    assert expected is not None
    assert expected.layout.cut < first.report.cut
    prompts.record_computed(expected)
    deleted = prefix[: first.report.cut + 198]
    later = prompts.infill(InfillRequest(prefix=deleted, suffix=suffix), healing=False)
    assert later.report is not None
    assert later.report.cut == expected.layout.cut
    assert prompts.expected_prompt("document-999") is None


def test_named_fim_tokens_must_exist(checkpoint: Checkpoint) -> None:
    with pytest.raises(OptionError, match=r"--fim-tokens: .*<nope>.* nearest are <"):
        fim_format(checkpoint, ("<fim_prefix>", "<nope>", "<fim_middle>"))


def test_the_oldest_files_are_dropped_where_the_client_allows_it(
    prompts: PromptEncoder, checkpoint: Checkpoint
) -> None:
    names = "abcdefgh"
    context = tuple(ContextFile(f"{name} = 1\n", f"{name}.py") for name in names)
    each = len(checkpoint.tokenizer.encode("# a.py\na = 1\n")) + 1  # a separator is allowed for
    request = InfillRequest(prefix="p = ", suffix="\n", context_files=context, snippets=True)
    prompt = prompts.infill(request, healing=False)
    shown = checkpoint.tokenizer.decode(prompt.token_ids)
    kept = [name for name in names if f"{name} = 1" in shown]
    assert kept == list(names[-len(kept) :])
    assert 7 / 16 * CONTEXT - each <= len(kept) * each <= 9 / 16 * CONTEXT


def test_a_long_document_leaves_room_for_files_that_may_be_dropped(
    prompts: PromptEncoder,
) -> None:
    context = tuple(ContextFile(f"{name} = 1\n", f"{name}.py") for name in "abc")
    prefix = "".join(f"x{number} = {number}\n" for number in range(400))
    prompt = prompts.infill(InfillRequest(prefix=prefix, context_files=context, snippets=True))
    assert CONTEXT // 2 < len(prompt.token_ids) < CONTEXT
    assert prompt.report is not None
    assert prompt.report.window is not None
    assert prompt.report.window[0] > 0


def test_a_file_that_never_fits_is_dropped(prompts: PromptEncoder) -> None:
    for text in ("ab" * CONTEXT, "x" * 3_000_000):
        alone = prompts.infill(
            InfillRequest(prefix="p = ", context_files=(ContextFile(text),), snippets=True)
        )
        assert alone.token_ids == prompts.infill(InfillRequest(prefix="p = ")).token_ids


def test_files_without_separators_are_found_by_their_texts(
    tiny_folder: Path,
) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 100)
    files = (ContextFile("A = 'ä'\n", "a.py"), ContextFile("B = 2\n", "b.py"))
    prompt = prompts.infill(InfillRequest(prefix="p", suffix="q", context_files=files, path="d.py"))
    decode = checkpoint.tokenizer.decode
    texts = [decode(prompt.token_ids[a:b]) for a, b in itertools.pairwise(prompt.contexts)]
    assert texts == ["# a.py\nA = 'ä'\n", "# b.py\nB = 2\n"]
    assert prompt.contexts[0] == 1  # after PRE
    assert decode(prompt.token_ids[prompt.contexts[-1] :]).startswith("# d.py\n")
    assert prompts.infill(InfillRequest(prefix="p", suffix="q")).contexts == ()
