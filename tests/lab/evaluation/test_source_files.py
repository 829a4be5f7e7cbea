"""Source files: which are read, and the words and complete places in their code."""

from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.source_files import SourceFile, read_files

JAVASCRIPT = """\
/* a comment with words
   and a line; */
const first = "a string with words;" + 'another; one';
function second(parameter) {  // a comment with words;
    const pattern = /words'"[/]in regular/g.exec(parameter);
    const text = `a template
with words;`;

    call(parameter,

         other / 2, parameter / 3);
    return {
        name: first,
    };
}
"""
GO = """\
package main

import "fmt"

// run does; something
func run(name string) error {
\ttext := `raw
string;`
\tfmt.Println(
\t\tname,
\t)
\tif name == "" {
\t\treturn nil
\t}

\treturn fmt.Errorf("words %s", text)
}
"""
PYTHON = '''\
"""A docstring
with words; and

lines."""

import first


@decorator
def second(parameter):
    value = call(
        parameter,

        "a string with words",
    )
    if value: return 1
    other = 2  # a comment

    return [value]
'''


def words(name: str, text: str) -> list[str]:
    return [text[start:end] for start, end in SourceFile(name, text).words]


def ends(name: str, text: str) -> list[str]:
    """Return the lines at whose ends nothing is missing."""
    places, _ = SourceFile(name, text).complete_places
    assert all(text[place] == "\n" for place in places)
    return [text[:place].rpartition("\n")[2].strip() for place in places]


def blank_lines(name: str, text: str) -> list[int]:
    """Return the numbers of the blank lines where nothing is missing."""
    _, places = SourceFile(name, text).complete_places
    assert all(text[place] == "\n" for place in places)
    return [text.count("\n", 0, place) + 1 for place in places]


def test_words_are_not_of_strings_comments_or_regular_expressions() -> None:
    assert words("a.js", JAVASCRIPT) == [
        *("const", "first", "function", "second", "parameter", "const", "pattern", "exec"),
        *("parameter", "const", "text", "call", "parameter", "other", "parameter", "return"),
        *("name", "first"),
    ]
    assert words("a.go", GO)[:8] == [
        *("package", "main", "import", "func", "name", "string", "error", "text"),
    ]
    assert "raw" not in words("a.go", GO)
    assert set(words("a.py", PYTHON)) == {
        *("import", "first", "decorator", "second", "parameter", "value", "call", "return"),
        "other",
    }
    assert words("notes.txt", "some 'quoted words' and an_identifier x1234") == [
        "some",
        "an_identifier",
        "x1234",
    ]


def test_statements_end_where_a_line_ends_them() -> None:
    assert ends("a.js", JAVASCRIPT) == [
        """const first = "a string with words;" + 'another; one';""",
        """const pattern = /words'"[/]in regular/g.exec(parameter);""",
        "with words;`;",
        "other / 2, parameter / 3);",
        "};",
        "}",
    ]
    assert ends("a.go", GO) == [")", "}", 'return fmt.Errorf("words %s", text)', "}"]
    assert ends("a.py", PYTHON) == [
        'lines."""',
        "import first",
        ")",
        "if value: return 1",
        "return [value]",
    ]


def test_blank_lines_of_strings_and_brackets_do_not_count() -> None:
    assert blank_lines("a.js", JAVASCRIPT) == [8]
    assert blank_lines("a.go", GO) == [2, 4, 15]
    assert blank_lines("a.py", PYTHON) == [5, 7, 8, 18]


def test_a_file_with_a_syntax_error_is_read_up_to_it() -> None:
    assert words("a.py", "first = second\n'open string\nthird\n")[:2] == ["first", "second"]


def test_folders_are_searched_and_unusable_files_skipped(tmp_path: Path) -> None:
    for folder in ("deep/er", "deep/_vendor", "node_modules"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "good.py").write_bytes(b"value = 1\r\n" * 50)
    (tmp_path / "binary.py").write_bytes(b"\xff\x00" * 500)
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "minified.py").write_text("x=1;" * 200 + "\n")
    (tmp_path / "other.txt").write_text("x = 1\n" * 100)
    (only,) = read_files([tmp_path])
    assert only.name == f"{tmp_path.name}/deep/er/good.py"
    assert only.text == "value = 1\n" * 50
    assert len(read_files([tmp_path / "other.txt"])) == 1  # named itself
    assert len(read_files([tmp_path], (".py", ".txt"))) == 2


def test_bad_input_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match="no such file"):
        read_files([tmp_path / "none"])
    with pytest.raises(MidfillError, match=r"no \.js or \.go files in .*; see --suffixes"):
        read_files([tmp_path], (".js", ".go"))
    (tmp_path / "short.py").write_text("x = 1\n")
    with pytest.raises(MidfillError, match=r"none of the 1 files .* at least 400 characters"):
        read_files([tmp_path])
