"""What llama.vim and llama.vscode send, and their ring of chunks."""

import random

import pytest
from plugin_sessions import LINES, ask, state, text

from benchmarks.plugins.llama_cpp import (
    LlamaPlugin,
    LlamaVim,
    LlamaVscode,
    Ring,
    common_lines,
    common_words,
)
from midfill_lab.bench.editing import Round


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
