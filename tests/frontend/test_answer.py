"""Answer: from engine outputs to text, log probabilities and finish reasons."""

import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from midfill.engine.request import EngineOutput, FinishReason, TokenLogprobs
from midfill.errors import GenerationError
from midfill.frontend.answer import AnswerBuilder, AnswerDelta, StopScanner, StopStrings
from midfill.frontend.sampling import PostProcessing, SamplingParams
from midfill.infill.trim import Trimmer
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.tokenizer import Tokenizer

END_OF_TEXT = 0


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_folder).tokenizer


def output(
    token_ids: list[int], finish_reason: FinishReason | None = None, *, logprobs: bool = False
) -> EngineOutput:
    return EngineOutput(
        request_id="r",
        index=0,
        token_ids=token_ids,
        finish_reason=finish_reason,
        logprobs=[TokenLogprobs(-float(i), [(i, -1.0)]) for i in token_ids] if logprobs else None,
    )


def run(
    tokenizer: Tokenizer,
    outputs: list[EngineOutput],
    sampling: SamplingParams,
    *,
    healed: int = 0,
    trimmer: Trimmer | None = None,
    line_break: str = "",
) -> tuple[AnswerBuilder, list[AnswerDelta]]:
    stops = StopStrings((*sampling.stop, *sampling.post_processing.stop))
    answer = AnswerBuilder(
        0, tokenizer, sampling, stops, healed=healed, trimmer=trimmer, line_break=line_break
    )
    pushed = [answer.push(item) for item in outputs]
    return answer, [delta for delta in pushed if delta is not None]


def text_of(deltas: list[AnswerDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(st.text(min_size=1, max_size=20), st.data())
def test_text_does_not_depend_on_how_tokens_are_grouped(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=4)) | {0, len(ids)})
    outputs = [output(ids[a:b]) for a, b in itertools.pairwise(cuts)]
    sampling = SamplingParams(max_tokens=1000)
    _, deltas = run(tokenizer, [*outputs, output([], "length")], sampling)
    assert text_of(deltas) == text
    assert [i for delta in deltas for i in delta.token_ids] == ids
    assert all("\ufffd" not in delta.text for delta in deltas) or "\ufffd" in text


def test_the_models_end_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    answer, deltas = run(tokenizer, [output([*ids, END_OF_TEXT], "stop")], SamplingParams())
    assert text_of(deltas) == "abc"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason is None
    assert answer.tokens == len(ids) + 1


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_with_text_is_shown_on_demand(tokenizer: Tokenizer, include: bool) -> None:
    (stop,) = tokenizer.encode("!")
    sampling = SamplingParams(stop_token_ids=(stop,), include_stop_str_in_output=include)
    ids = tokenizer.encode("ab")
    _, deltas = run(tokenizer, [output([*ids, stop], "stop")], sampling)
    assert text_of(deltas) == ("ab!" if include else "ab")
    assert deltas[-1].stop_reason == stop


def test_a_stop_string_across_tokens_ends_the_answer(tokenizer: Tokenizer) -> None:
    ids = [i for letter in "ab#!cd" for i in tokenizer.encode(letter)]
    sampling = SamplingParams(stop=("#!",))
    answer, deltas = run(tokenizer, [output([i]) for i in ids], sampling)
    assert text_of(deltas) == "ab"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "#!")
    assert answer.finished
    assert answer.tokens == 4  # what came after is not part of it


def test_an_incomplete_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    ids = [i for letter in "ab#" for i in tokenizer.encode(letter)]
    outputs = [output([i]) for i in ids[:-1]] + [output(ids[-1:], "length")]
    _, deltas = run(tokenizer, outputs, SamplingParams(stop=("#!",)))
    assert text_of(deltas) == "ab#"
    assert deltas[-1].finish_reason == "length"


def test_half_a_character_at_the_end_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    _, deltas = run(tokenizer, [output(ids[:1], "length")], SamplingParams())
    assert text_of(deltas) == "\ufffd"


def test_logprobs_are_returned_with_their_text(tokenizer: Tokenizer) -> None:
    ids = [i for letter in "a#b#!c" for i in tokenizer.encode(letter)]
    sampling = SamplingParams(stop=("#!",), logprobs=1)
    _, deltas = run(tokenizer, [output([i], logprobs=True) for i in ids], sampling)
    shown = ""
    for delta in deltas:
        for report in delta.logprobs:
            assert report.offset == len(shown)
            shown += report.chosen.text
        assert shown.startswith(text_of(deltas)[: len(shown)])
    assert shown == text_of(deltas) == "a#b"


def test_logprobs_of_zero_report_only_the_chosen_token(tokenizer: Tokenizer) -> None:
    (token_id,) = tokenizer.encode("a")
    _, deltas = run(
        tokenizer, [output([token_id], "length", logprobs=True)], SamplingParams(logprobs=0)
    )
    (report,) = deltas[0].logprobs
    assert report.top == ()
    assert report.chosen.logprob == -float(token_id)
    assert report.chosen.bytes == b"a"


def test_an_engine_error_is_raised(tokenizer: Tokenizer) -> None:
    failed = EngineOutput(
        request_id="r", index=0, token_ids=[], finish_reason="error", error="no slots left"
    )
    with pytest.raises(GenerationError, match="no slots left"):
        run(tokenizer, [failed], SamplingParams())


def byte_tokens(tokenizer: Tokenizer, written: bytes) -> list[int]:
    """Return one token per byte."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [single[bytes([byte])] for byte in written]


@given(st.text(max_size=8), st.text(max_size=8), st.data())
def test_healed_bytes_are_left_out_to_the_byte(
    tokenizer: Tokenizer, before: str, after: str, data: st.DataObject
) -> None:
    """Covers tokens that reach across the caret, and healing from inside a character."""
    healed = data.draw(st.integers(0, len(before.encode())))
    written = (before + after).encode()[len(before.encode()) - healed :]
    ids = byte_tokens(tokenizer, written)
    if healed == len(before.encode()) and data.draw(st.booleans()):
        ids = tokenizer.encode(before + after)
    sampling = SamplingParams(max_tokens=1000)
    outputs = [*(output([token_id]) for token_id in ids), output([], "length")]
    _, deltas = run(tokenizer, outputs, sampling, healed=healed)
    assert text_of(deltas) == after
    assert [i for delta in deltas for i in delta.token_ids] == ids


def test_tokens_of_healed_bytes_are_neither_counted_nor_reported(tokenizer: Tokenizer) -> None:
    (llama,) = tokenizer.encode("llama")
    t, ok = tokenizer.encode("t"), byte_tokens(tokenizer, b"oken")
    outputs = [output([i], logprobs=True) for i in (*t, *ok)]
    answer, deltas = run(
        tokenizer, outputs, SamplingParams(logprobs=1, max_tokens=3), healed=len("to")
    )
    assert text_of(deltas) == "ken"
    assert answer.tokens == 3
    assert deltas[-1].finish_reason == "length"
    reports = [report for delta in deltas for report in delta.logprobs]
    assert [(report.chosen.text, report.offset) for report in reports] == [
        ("k", 0),
        ("e", 1),
        ("n", 2),
    ]
    only_healed, _ = run(tokenizer, [output([llama])], SamplingParams(), healed=len("llama"))
    assert only_healed.tokens == 0


def test_a_token_that_begins_with_healed_bytes_is_reported_without_them(
    tokenizer: Tokenizer,
) -> None:
    names = ["token", "to", "tokenizer", "ti", "tor"]
    chosen, *others = [tokenizer.encode(name)[0] for name in names]
    logprobs = TokenLogprobs(-0.5, [(chosen, -0.5), *((other, -2.0) for other in others)])
    written = EngineOutput(
        request_id="r", index=0, token_ids=[chosen], logprobs=[logprobs], finish_reason="length"
    )
    _, (delta,) = run(tokenizer, [written], SamplingParams(logprobs=5), healed=len("to"))
    (report,) = delta.logprobs
    assert (delta.text, report.chosen.text, report.chosen.bytes) == ("ken", "ken", b"ken")
    assert [candidate.text for candidate in report.top] == ["ken", "kenizer", "r"]


def test_a_stop_string_in_healed_bytes_does_not_end_the_answer(tokenizer: Tokenizer) -> None:
    outputs = [output([i]) for i in byte_tokens(tokenizer, b"\n  a\n b")]
    _, deltas = run(tokenizer, outputs, SamplingParams(stop=("\n", " a")), healed=len("\n "))
    assert text_of(deltas) == ""
    assert deltas[-1].stop_reason == " a"
    _, deltas = run(tokenizer, outputs, SamplingParams(stop=("\n",)), healed=len("\n "))
    assert text_of(deltas) == " a"


def test_only_what_may_be_cut_is_held_back(tokenizer: Tokenizer) -> None:
    outputs = [output([i], logprobs=True) for i in byte_tokens(tokenizer, b"ab, cd")]
    sampling = SamplingParams(logprobs=0, max_tokens=6)
    _, deltas = run(tokenizer, outputs, sampling, trimmer=Trimmer("(", ", cd)", overlap=True))
    assert [delta.text for delta in deltas] == ["a", "b", ""]
    assert [report.chosen.text for delta in deltas for report in delta.logprobs] == ["a", "b"]
    assert sum(len(delta.token_ids) for delta in deltas) == 6
    assert deltas[-1].finish_reason == "stop"  # it is complete, though of the maximum length
    _, deltas = run(tokenizer, outputs, sampling, trimmer=Trimmer("(", ", ce)", overlap=True))
    assert [delta.text for delta in deltas] == ["a", "b", ", cd"]
    assert [len(delta.logprobs) for delta in deltas] == [1, 1, 4]
    assert deltas[-1].finish_reason == "length"


def test_closing_brackets_are_no_token_of_the_answer(tokenizer: Tokenizer) -> None:
    outputs = [output([i], logprobs=True) for i in byte_tokens(tokenizer, b"([x")]
    sampling = SamplingParams(logprobs=0, max_tokens=3)
    _, deltas = run(tokenizer, outputs, sampling, trimmer=Trimmer("", "", brackets="close"))
    assert [delta.text for delta in deltas] == ["(", "[", "x])"]
    assert [len(delta.logprobs) for delta in deltas] == [1, 1, 1]


def test_a_block_that_has_ended_ends_the_answer(tokenizer: Tokenizer) -> None:
    outputs = [output([i]) for i in byte_tokens(tokenizer, b"a\n  b\nc\nd")]
    trimmer = Trimmer("  ", "", lines="block")
    answer, deltas = run(tokenizer, outputs, SamplingParams(), trimmer=trimmer)
    assert text_of(deltas) == "a\n  b"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert answer.finished


def test_a_single_line_ends_at_its_line_break(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(post_processing=PostProcessing(lines="single"))
    outputs = [output([i]) for i in byte_tokens(tokenizer, b"ab\r\ncd")]
    answer, deltas = run(tokenizer, outputs, sampling, trimmer=Trimmer("", "", lines="single"))
    assert text_of(deltas) == "ab"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "\r\n")
    assert answer.tokens == 4


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ([0.0, 0.1, 0.2, 0.3], "a\nb\nc\nd"),  # the time is never over
        ([0.0, 0.4, 0.6, 0.7], "a\nb\nc"),  # over within the third line
        ([0.0, 9.0, 9.1, 9.2], "a\nb"),
        ([7.0, 7.1, 7.6, 7.7], "a\nb\nc"),  # counted from the first token
    ],
)
def test_an_answer_whose_time_is_over_ends_with_its_line(
    tokenizer: Tokenizer, seconds: list[float], shown: str
) -> None:
    sampling = SamplingParams(post_processing=PostProcessing(max_seconds=0.5))
    trimmer = sampling.post_processing.trimmer("", "", infilling=False)
    clock = iter(seconds).__next__
    answer = AnswerBuilder(0, tokenizer, sampling, StopStrings(()), trimmer=trimmer, clock=clock)
    lines = [output(tokenizer.encode(line)) for line in ("a\n", "b\n", "c\n")]
    last = output([*tokenizer.encode("d"), END_OF_TEXT], "stop")
    deltas = [answer.push(item) for item in (*lines, last)]
    pushed = [delta for delta in deltas if delta is not None]
    assert text_of(pushed) == shown
    assert pushed[-1].finish_reason == ("stop" if shown.endswith("d") else "length")
    assert answer.finished


class TestLineBreaksAtTheEnd:
    def answer(
        self, tokenizer: Tokenizer, text: str, reason: FinishReason = "stop", line_break: str = "\n"
    ) -> list[str]:
        ids = [*tokenizer.encode(text), END_OF_TEXT]
        outputs = [output([token_id]) for token_id in ids[:-1]]
        outputs.append(output(ids[-1:], reason))
        _, deltas = run(tokenizer, outputs, SamplingParams(max_tokens=99), line_break=line_break)
        return [delta.text for delta in deltas]

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_an_answer_gets_the_one_it_lacks(
        self, tokenizer: Tokenizer, reason: FinishReason
    ) -> None:
        texts = self.answer(tokenizer, "  x = 1", reason, "\r\n")
        assert "".join(texts).startswith("  x = 1")
        assert texts[-1].endswith("\r\n")
        assert not any("\r\n" in text for text in texts[:-1])

    @pytest.mark.parametrize("text", ["", "  ", "\n  ", "x\n", "x\r\n"])
    def test_blank_answers_and_those_that_have_one_get_none(
        self, tokenizer: Tokenizer, text: str
    ) -> None:
        assert "".join(self.answer(tokenizer, text)) == text

    def test_it_follows_what_trimming_leaves(self, tokenizer: Tokenizer) -> None:
        trimmer = PostProcessing().trimmer("a\n", "\n    return x\n", infilling=True)
        ids = tokenizer.encode("    x = 1\n    return x")
        _, deltas = run(
            tokenizer,
            [output(ids), output([END_OF_TEXT], "stop")],
            SamplingParams(max_tokens=99),
            trimmer=trimmer,
            line_break="\n",
        )
        assert text_of(deltas) == "    x = 1\n"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("soft_max_tokens", "shown"),
    [(0, "ab\ncd\nef"), (1, "ab"), (2, "ab"), (3, "ab\ncd"), (5, "ab\ncd"), (6, "ab\ncd\nef")],
)
def test_from_a_number_of_tokens_on_an_answer_ends_with_its_line(
    tokenizer: Tokenizer, soft_max_tokens: int, shown: str, grouped: bool
) -> None:
    sampling = SamplingParams(post_processing=PostProcessing(soft_max_tokens=soft_max_tokens))
    trimmer = sampling.post_processing.trimmer("", "", infilling=False)
    tokens = byte_tokens(tokenizer, b"ab\ncd\nef")
    outputs = [output([*tokens, END_OF_TEXT], "stop")]
    if not grouped:
        outputs = [*(output([token]) for token in tokens), output([END_OF_TEXT], "stop")]
    _, deltas = run(tokenizer, outputs, sampling, trimmer=trimmer)
    assert text_of(deltas) == shown
    assert deltas[-1].finish_reason == ("stop" if shown.endswith("f") else "length")


def test_an_answer_of_no_tokens_scores_the_prompt_alone(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=1)
    answer, deltas = run(tokenizer, [output([70], "length")], sampling)
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("", "length")]
    assert answer.tokens == 0


def test_the_mean_log_probability_counts_the_token_that_ended_the_answer(
    tokenizer: Tokenizer,
) -> None:
    outputs = [output([70, 72], logprobs=True), output([END_OF_TEXT], "stop", logprobs=True)]
    answer, _ = run(tokenizer, outputs, SamplingParams(logprobs=0))
    assert answer.mean_logprob == pytest.approx(-(70 + 72 + END_OF_TEXT) / 3)
    assert run(tokenizer, [output([70], "stop")], SamplingParams())[0].mean_logprob == -float("inf")


# Few letters, so that stop strings overlap each other and themselves.
words = st.text("ab\n", max_size=4)
texts = st.text("ab\n", max_size=30)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the earliest-ending stop string starts, the longest if several end there; naively."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return end - len(longest), longest
    return None


def scan(chunks: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    scanner = StopScanner(StopStrings(stops), include_stop=include)
    shown = "".join(scanner.push(chunk) for chunk in chunks)
    return shown + scanner.flush(), scanner.stopped


@given(st.lists(texts, max_size=6), st.lists(words, max_size=4), st.booleans())
def test_the_result_does_not_depend_on_chunks(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(chunks)
    found = first_stop(text, stops)
    if found is None:
        expected: tuple[str, str | None] = (text, None)
    else:
        start, stop = found
        expected = (text[: start + len(stop)] if include else text[:start], stop)
    assert scan(chunks, stops, include=include) == expected


@given(texts, st.lists(words, min_size=1, max_size=4))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    shown, seen = "", ""
    for character in text:
        shown += scanner.push(character)
        seen += character
        if scanner.stopped is not None:
            break
        held = seen[len(shown) :]
        # Every longer end of the text begins no stop string.
        longest = max(
            (k for k in range(len(seen) + 1) for s in stops if s[:k] == seen[len(seen) - k :]),
            default=0,
        )
        assert len(held) == longest


def test_nothing_is_returned_after_a_stop_string() -> None:
    scanner = StopScanner(StopStrings(["END"]))
    assert scanner.push("one END two") == "one "
    assert scanner.push("three") == ""
    assert scanner.flush() == ""
    assert scanner.stopped == "END"


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_text_passes(stops: list[str]) -> None:
    assert scan(["a", "b"], stops) == ("ab", None)
