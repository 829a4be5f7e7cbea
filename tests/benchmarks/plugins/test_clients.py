"""What each plugin sends."""

import json
import random
from collections.abc import Mapping

import pytest

from benchmarks.plugins.clients import (
    Continue,
    LanguageServer,
    LlamaPlugin,
    LlamaVim,
    LlamaVscode,
    Minuet,
    Plugin,
    Ring,
    Sent,
    Tabby,
    Twinny,
    Zed,
    common_lines,
    common_words,
)
from midfill.infill.template import parse_template
from midfill.lab.bench.editing import Round
from midfill.models.checkpoints.checkpoint import Checkpoint

LINES = [f"    line_{number} = {number}\n" for number in range(1600)]


def state(line: int, typed: str = "", document: str = "a.py", kind: str = "type") -> Round:
    """Return the state in which something was typed into a new line before the given one."""
    prefix, suffix = "".join(LINES[:line]) + typed, "\n" + "".join(LINES[line:])
    return Round(document, prefix, suffix, kind)  # type: ignore[arg-type]


def ask(plugin: Plugin, one: Round, hint: str = "") -> list[Sent]:
    """Return what a plugin sends, if all that it asks is answered with a hint."""
    asking, sent, response = plugin.ask(one, hint), [], None
    while True:
        try:
            sent.append(next(asking) if response is None else asking.send(response))
        except StopIteration:
            return sent
        body = {"content": hint}
        response = json.dumps([body] * 3 if "n_cmpl" in sent[-1].body else body)


def text(body: Mapping[str, object], *names: str) -> str:
    return "".join(str(body[name]) for name in names)


def test_minuet_sends_three_equal_requests_with_a_window_behind_a_header() -> None:
    (sent,) = ask(Minuet(), state(1000, "x"))
    assert sent.copies == 3
    prompt = text(sent.body, "prompt")
    assert prompt.startswith("# language: python\n# indentation")
    assert len(prompt) == 12_000 + len(Minuet.header)
    assert len(text(sent.body, "suffix")) == 4_000


@pytest.mark.parametrize(("line", "lines"), [(0, 100), (10, 100), (400, 100), (1595, 100)])
def test_twinny_sends_a_hundred_lines(line: int, lines: int) -> None:
    (sent,) = ask(Twinny(), state(line))
    filled = parse_template(text(sent.body, "prompt"), None)
    assert filled is not None
    window = filled.prefix.partition("(python) \n#")[2].partition("\n")[2] + filled.suffix
    assert abs(window.count("\n") - lines) <= 2


def test_zed_sends_whole_lines_on_both_sides() -> None:
    (sent,) = ask(Zed(), state(400, "    x"))
    filled = parse_template(text(sent.body, "prompt"), None)
    assert filled is not None
    assert filled.prefix.startswith("    line_3")
    above, below = filled.prefix.count("\n"), filled.suffix.count("\n")
    assert abs(above - below) <= 2
    assert 40 <= above <= 44
    (sent,) = ask(Zed(), state(0))
    filled = parse_template(text(sent.body, "prompt"), None)
    assert filled is not None
    assert filled.suffix.count("\n") > above + below - 4


def test_the_language_server_warms_where_typing_begins() -> None:
    lsp = LanguageServer()
    assert len(ask(lsp, state(10, "x"))) == 1
    assert len(ask(lsp, state(10, "xy"))) == 1
    warm, sent = ask(lsp, state(300, "x"))
    assert warm.body == {**sent.body, "max_tokens": 1}
    moved = Round("a.py", *_split(state(300, "x"), 50), "jump")
    assert len(ask(lsp, moved)) == 1


def _split(one: Round, at: int) -> tuple[str, str]:
    whole = one.prefix + one.suffix
    return whole[:at], whole[at:]


def test_tabby_sends_twenty_lines_and_parts_of_other_files() -> None:
    tabby = Tabby()
    ask(tabby, state(100, document="b.py"))
    (sent,) = ask(tabby, state(400))
    segments = sent.body["segments"]
    assert isinstance(segments, dict)
    assert segments["prefix"].count("\n") == segments["suffix"].count("\n") - 1 == 19
    assert len(segments["relevant_snippets_from_changed_files"]) == 3
    (viewed,) = segments["relevant_snippets_from_recently_opened_files"]
    assert "line_100 = " in viewed["body"]
    (alone,) = ask(Tabby(snippets=False), state(400))
    assert alone.body["segments"] == {
        name: segments[name] for name in ("prefix", "suffix", "filepath", "git_url")
    }


@pytest.mark.parametrize("qwen", [True, False])
def test_continue_fills_its_tokens_with_the_beginning_of_other_files(
    checkpoint: Checkpoint, qwen: bool
) -> None:
    tokenizer = checkpoint.tokenizer
    one = Continue(tokenizer.encode, tokenizer.decode, qwen=qwen)
    ask(one, state(100, document="b.py"))
    (first,) = ask(one, state(400))
    (later,) = ask(one, state(400, "xyz"))
    for sent, typed in ((first, ""), (later, "xyz")):
        prompt = text(sent.body, "prompt")
        assert 850 < len(tokenizer.encode(prompt)) < 1200
        filled = parse_template(prompt, None)
        assert filled is not None
        assert "line_0 = 0" in prompt
        assert filled.prefix.endswith(f"line_399 = 399\n{typed}")
    assert first.body["prompt"] != later.body["prompt"]


@pytest.mark.parametrize("kind", [LlamaVim, LlamaVscode])
class TestLlamaPlugins:
    def test_they_send_lines_around_the_caret(self, kind: type[LlamaPlugin]) -> None:
        (sent,) = ask(kind(snippets=False), state(400, "    x"))
        assert text(sent.body, "prompt") == "    x"
        assert text(sent.body, "input_prefix") == "".join(LINES[400 - 256 : 400])
        assert text(sent.body, "input_suffix") == "\n" + "".join(LINES[400:464])
        (blank,) = ask(kind(snippets=False), state(400, "    "))
        assert text(blank.body, "prompt") == ""

    def test_they_ask_what_would_follow_a_hint(self, kind: type[LlamaPlugin]) -> None:
        plugin = kind(snippets=False)
        first, second = ask(plugin, state(400, "    x"), " = 1\n    y")
        assert text(second.body, "input_prefix", "prompt") == (
            "".join(LINES[400 - 255 : 400]) + "    x = 1\n    y"
        )
        assert second.body["input_suffix"] == first.body["input_suffix"]

    def test_an_accepted_hint_is_known(self, kind: type[LlamaPlugin]) -> None:
        plugin = kind(snippets=False)
        ask(plugin, state(400, "    x"), " = 1")
        (only,) = ask(plugin, state(400, "    x = 1"), " = 1")
        assert text(only.body, "prompt") == "    x = 1 = 1"  # in advance

    def test_they_do_not_ask_inside_a_line(self, kind: type[LlamaPlugin]) -> None:
        whole = state(400).prefix + state(400).suffix
        assert ask(kind(), Round("a.py", whole[:60], whole[60:], "type")) == []

    def test_they_announce_chunks_when_the_user_moves(self, kind: type[LlamaPlugin]) -> None:
        plugin = kind()
        ask(plugin, state(400, kind="open"))
        sent = ask(plugin, state(50, document="b.py", kind="switch"))
        announced = [one for one in sent if one.body["n_predict"] == 0]
        assert announced
        assert all(one.body["input_prefix"] == "" for one in announced)
        extra = announced[-1].body["input_extra"]
        assert isinstance(extra, list)
        assert {chunk["filename"] for chunk in extra} <= {"a.py", "b.py"}


def test_vscode_does_not_ask_while_a_hint_is_typed() -> None:
    for plugin, asks in ((LlamaVim(snippets=False), True), (LlamaVscode(snippets=False), False)):
        ask(plugin, state(400, "    x"), " = 1")
        sent = ask(plugin, state(400, "    x ="), " = 1")
        assert ("    x =" in [one.body["prompt"] for one in sent]) == asks


def lines(first: int, count: int) -> list[str]:
    return [f"value_{number} = {number}" for number in range(first, first + count)]


def ring() -> Ring:
    return Ring(random.Random(1), common_lines)


def test_a_chunk_waits_until_the_user_pauses() -> None:
    one = ring()
    one.pick(lines(0, 10), "a.py", evict=False)
    assert one.extra() == []
    assert one.update()
    assert [entry["filename"] for entry in one.extra()] == ["a.py"]
    assert not one.update()


def test_of_a_long_text_half_a_chunk_is_taken() -> None:
    one = ring()
    one.pick(lines(0, 500), "a.py", evict=False)
    one.update()
    (chunk,) = one.chunks
    assert len(chunk.lines) == 32
    assert set(chunk.lines) <= set(lines(0, 500))


def test_the_oldest_chunk_leaves() -> None:
    one = ring()
    for number in range(20):
        one.pick(lines(100 * number, 10), f"{number}.py", evict=False)
        one.update()
    assert [chunk.filename for chunk in one.chunks] == [f"{number}.py" for number in range(4, 20)]


def test_what_is_there_already_is_not_picked_again() -> None:
    one = ring()
    for _ in range(2):
        one.pick(lines(0, 20), "a.py", evict=True)
        one.update()
    one.pick(lines(0, 2), "small.py", evict=True)
    assert len(one.chunks) == 1
    assert not one.update()


def test_a_similar_chunk_is_replaced_or_stays() -> None:
    for evict, first in ((False, 0), (True, 1)):
        one = ring()
        for start in (0, 1):
            one.pick(lines(start, 60), "a.py", evict=evict)
            one.update()
        (chunk,) = one.chunks
        assert chunk.lines[0] == f"value_{first} = {first}"


def test_chunks_like_what_is_around_the_caret_leave() -> None:
    one = ring()
    for start in (0, 100):
        one.pick(lines(start, 20), f"{start}.py", evict=False)
        one.update()
    one.evict_similar(lines(5, 20))
    assert [chunk.filename for chunk in one.chunks] == ["100.py"]


def test_similarity() -> None:
    assert common_lines(["a", "b"], ["b", "c", "b"]) == 1 / 3
    assert common_words(["a b"], ["b c"]) == 0.5
    assert common_lines([], []) == 0
