"""The last suggestion of a document, while it is typed."""

import pytest
from lsprotocol import types

from midfill.lsp.documents import Document, PositionEncoding
from midfill.lsp.suggestions import (
    Caret,
    LastSuggestions,
    Suggestion,
    inline_items,
    menu_items,
    wants_snippets,
)

URI = "file:///a.py"


@pytest.fixture
def last() -> LastSuggestions:
    last = LastSuggestions()
    last.remember(Caret(URI, "x = ", "\ny"), Suggestion("s", "foo(\n    bar)"))
    return last


@pytest.mark.parametrize(
    ("prefix", "rest"),
    [
        ("x = ", "foo(\n    bar)"),
        ("x = fo", "o(\n    bar)"),
        ("x = foo(\n    b", "ar)"),
    ],
)
def test_what_was_typed_of_it_is_left_out(last: LastSuggestions, prefix: str, rest: str) -> None:
    assert last.rest(Caret(URI, prefix, "\ny")) == Suggestion("s", rest)


@pytest.mark.parametrize(
    "caret",
    [
        Caret(URI, "x = fa", "\ny"),  # something else was typed
        Caret(URI, "x =", "\ny"),  # deleted
        Caret(URI, "x = f", ")\ny"),  # typed, and changed elsewhere
        Caret(URI, "z = f", "\ny"),
        Caret(URI, "x = foo(\n    bar)", "\ny"),  # nothing is left
        Caret(URI, "x = foo(\n    bar) + 1", "\ny"),
        Caret("file:///b.py", "x = f", "\ny"),
    ],
)
def test_it_fits_no_other_caret(last: LastSuggestions, caret: Caret) -> None:
    assert last.rest(caret) is None


def test_blanks_that_are_left_are_no_suggestion() -> None:
    last = LastSuggestions()
    last.remember(Caret(URI, "", ""), Suggestion("s", "a \n "))
    assert last.rest(Caret(URI, "a", "")) is None


def test_it_can_be_forgotten(last: LastSuggestions) -> None:
    last.forget("file:///b.py")
    assert last.rest(Caret(URI, "x = ", "\ny")) is not None
    last.forget(URI)
    assert last.rest(Caret(URI, "x = ", "\ny")) is None


def test_the_model_is_shown_plain_line_feeds() -> None:
    caret = Caret.in_text(URI, "a\r\nb\rc\nd", 5)
    assert (caret.prefix, caret.suffix) == ("a\nb\n", "c\nd")
    assert not caret.at_line_end
    assert Caret.in_text(URI, "a\r\nb", 1).at_line_end
    assert Caret.in_text(URI, "a", 1).at_line_end


def span(line: int, start: int, end: int) -> types.Range:
    return types.Range(types.Position(line, start), types.Position(line, end))


def document(text: str, encoding: PositionEncoding = "utf-16") -> tuple[Document, int]:
    """A document with the caret at the bar."""
    return Document.opened("file:///a", text.replace("|", ""), encoding), text.index("|")


@pytest.mark.parametrize(
    ("text", "insert", "range"),
    [
        ("return |", "x", span(0, 7, 7)),
        ("x\n\treturn a.b(c|", "a.b(cx", span(1, 8, 13)),
        ("x\n    |\n", "x", span(1, 4, 4)),
        ("x\r\n|", "x", span(1, 0, 0)),
        ("𝄞 𝄞é|)", "𝄞éx", span(0, 3, 6)),
    ],
)
def test_an_inline_item_continues_what_stands_before_the_caret(
    text: str, insert: str, range: types.Range
) -> None:
    (item,) = inline_items(*document(text), [Suggestion("id", "x")])
    assert item.insert_text == item.filter_text == insert
    assert item.range == range
    assert item.command is not None
    assert item.command.arguments == ["id"]


@pytest.mark.parametrize(
    ("encoding", "columns"), [("utf-8", (5, 11)), ("utf-16", (3, 6)), ("utf-32", (2, 4))]
)
def test_ranges_are_in_the_agreed_encoding(
    encoding: PositionEncoding, columns: tuple[int, int]
) -> None:
    (item,) = inline_items(*document("𝄞 𝄞é|", encoding), [Suggestion("id", "x")])
    assert item.range == span(0, *columns)


def test_a_menu_item_continues_the_word_before_the_caret() -> None:
    suggestions = [Suggestion("1", "k(\n    a)"), Suggestion("2", " " + "long " * 30)]
    first, second = menu_items(*document("a.wor|"), suggestions)
    assert first.label == "work("
    assert first.filter_text == "work(\n    a)"
    assert first.text_edit == types.TextEdit(span(0, 2, 5), "work(\n    a)")
    assert first.sort_text is not None
    assert second.sort_text is not None
    assert first.sort_text < second.sort_text < "a"
    assert len(second.label) == 60
    assert second.label.endswith("…")


def test_a_menu_items_label_is_its_first_line_with_text() -> None:
    (item,) = menu_items(*document("x:|"), [Suggestion("1", "\n    return 1\nb")])
    assert item.label == "return 1"


@pytest.mark.parametrize(
    ("text", "suggestion", "snippet"),
    [
        # The client begins further lines as the caret's begins; blank lines may have less.
        ("\tif wi|", "dth:\n\t\treturn\n\n\tx", "width:\n\treturn\n\nx"),
        ("a.wi|", "${d} \\", "wi\\${d\\} \\\\"),
        # What stands further left can't be had.
        ("    wi|", "dth\n  x\n    y", "width"),
        ("wi|  # note", "dth\n  x\ny", "width\nx"),  # without the word, blanks begin the line
    ],
)
def test_a_snippet_leaves_out_what_its_client_adds(
    text: str, suggestion: str, snippet: str
) -> None:
    (item,) = menu_items(*document(text), [Suggestion("1", suggestion)], snippets=True)
    assert item.insert_text_format == types.InsertTextFormat.Snippet
    assert isinstance(item.text_edit, types.TextEdit)
    assert item.text_edit.new_text == snippet


def test_a_snippet_shows_all_of_its_first_line() -> None:
    long = "long " * 30
    (item,) = menu_items(*document("|"), [Suggestion("1", long + "\nx")], snippets=True)
    assert item.label == long.strip()


def test_a_snippet_of_which_nothing_is_left_is_not_offered() -> None:
    assert menu_items(*document("    |"), [Suggestion("1", "\nx")], snippets=True) == []


@pytest.mark.parametrize(
    ("name", "capabilities", "wanted"),
    [
        ("Neovim", {"snippet_support": True}, True),
        ("Neovim", {"snippet_support": True, "insert_replace_support": True}, False),  # a plugin
        ("Neovim", {}, False),
        ("Emacs", {"snippet_support": True}, False),
    ],
)
def test_only_neovims_own_menu_wants_snippets(
    name: str, capabilities: dict[str, bool], wanted: bool
) -> None:
    menu = types.CompletionClientCapabilities(
        completion_item=types.ClientCompletionItemOptions(**capabilities)
    )
    editor = types.ClientCapabilities(
        text_document=types.TextDocumentClientCapabilities(completion=menu)
    )
    client = types.ClientInfo(name)
    assert wants_snippets(types.InitializeParams(editor, client_info=client)) is wanted


def test_a_client_that_says_nothing_of_itself_wants_no_snippets() -> None:
    assert not wants_snippets(types.InitializeParams(types.ClientCapabilities()))
