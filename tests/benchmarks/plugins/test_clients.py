"""What each plugin sends."""

import pytest
from plugin_sessions import ask, state, text

from benchmarks.plugins.clients import (
    Continue,
    LanguageServer,
    Minuet,
    Tabby,
    Twinny,
    Zed,
)
from midfill.infill.template import parse_template
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill_lab.bench.editing import Round


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
