"""Source files that holes are cut from, and the places in their code."""

import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from midfill.errors import MidfillError, OptionError

MIN_FILE_CHARACTERS = 400
"""Shorter files have too little context around a hole."""

DEFAULT_SUFFIXES = (".py",)

# Folders of other projects' code, and of data in the form of code.
_SKIPPED_FOLDERS = frozenset({"_vendor", "vendor", "vendored", "node_modules", "locale", "locales"})
_MAX_LINE_CHARACTERS = 160
_MAX_MEAN_LINE_CHARACTERS = 100  # of a file; above, it is minified or generated
_MIN_WORD_CHARACTERS = 4
_WORD = r"[^\W\d]\w*"
_STRINGS = r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
_BLOCK_COMMENT = r"/\*.*?(?:\*/|\Z)"
# After these, a slash starts a regular expression and not a division.
_REGULAR_EXPRESSION = r"(?<=[=(,:\[!&|?{};])\s*/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/"


@dataclass(frozen=True)
class _Language:
    """How to find words and statements in a language other than Python.

    Attributes:
        ignored: pattern of comments and literals.
        statement_ends: last characters of lines that end a statement.
    """

    ignored: str
    statement_ends: str


_JAVASCRIPT = _Language(
    rf"{_BLOCK_COMMENT}|//[^\n]*|{_STRINGS}|`(?:\\.|[^`\\])*`|{_REGULAR_EXPRESSION}", ";}"
)
_GO = _Language(rf"{_BLOCK_COMMENT}|//[^\n]*|{_STRINGS}|`[^`]*`", ")}")
_TEXT = _Language(_STRINGS, ".;}")
_LANGUAGES = {
    **dict.fromkeys((".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx"), _JAVASCRIPT),
    ".go": _GO,
}

Span = tuple[int, int]
"""Start and end of a piece of a text."""


@dataclass(frozen=True)
class SourceFile:
    """A file to cut holes into. The language follows from its suffix.

    Attributes:
        name: its path relative to the parent of the folder that the user named.
        text: its text with LF line ends.
    """

    name: str
    text: str

    @property
    def suffix(self) -> str:
        """The suffix of its name, such as ".py"."""
        return Path(self.name).suffix

    @cached_property
    def code_lines(self) -> list[Span]:
        """Start and end of each line's code, without blank and very long lines."""
        return list(_find_lines(self.text))

    @cached_property
    def words(self) -> list[Span]:
        """The identifiers and keywords of at least four characters outside strings and comments.

        In Python up to a syntax error.
        """
        found = _find_python_words if self.suffix in (".py", ".pyi") else self._find_words
        return list(found(self.text))

    @cached_property
    def complete_places(self) -> tuple[list[int], list[int]]:
        """Places where nothing is missing: ends of lines that end a statement, and blank lines.

        Lines that open a block don't count, nor does anything inside brackets, a string or a
        comment.
        """
        if self.suffix in (".py", ".pyi"):
            return _find_python_places(self.text)
        return _find_places(self.text, self._language)

    @property
    def _language(self) -> _Language:
        return _LANGUAGES.get(self.suffix, _TEXT)

    def _find_words(self, text: str) -> Iterator[Span]:
        pattern = re.compile(rf"(?:{self._language.ignored})|(?P<word>{_WORD})", re.DOTALL)
        for match in pattern.finditer(text):
            start, end = match.span("word")
            if end - start >= _MIN_WORD_CHARACTERS:
                yield start, end


def read_files(
    paths: Sequence[Path], suffixes: Sequence[str] = DEFAULT_SUFFIXES
) -> list[SourceFile]:
    """Read files, and the files with some suffixes in folders, each folder's sorted by name.

    Files that are not UTF-8, shorter than ``MIN_FILE_CHARACTERS`` or minified are skipped, and so
    are folders of vendored code.

    Raises:
        MidfillError: a path doesn't exist, or no usable file is left.
    """
    files: list[SourceFile] = []
    found = 0
    for path in paths:
        if not path.exists():
            raise OptionError(f"--files {path}: no such file or folder")
        root = path if path.is_dir() else path.parent
        for file in _find_files(path, suffixes) if path.is_dir() else [path]:
            if not file.is_file():
                continue
            found += 1
            try:
                text = file.read_text("utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if _is_usable(text):
                name = file.relative_to(root).as_posix()
                within = f"{path.resolve().name}/" if path.is_dir() else ""
                files.append(SourceFile(within + name, text))
    where = ", ".join(map(str, paths))
    if not found:
        raise MidfillError(f"no {' or '.join(suffixes)} files in {where}; see --suffixes")
    if not files:
        raise MidfillError(
            f"none of the {found} files in {where} is a text of at least"
            f" {MIN_FILE_CHARACTERS} characters in lines of usual length"
        )
    return files


def _find_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in suffixes
        and _SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts[:-1])
    )


def _is_usable(text: str) -> bool:
    lines = text.count("\n") + 1
    return (
        len(text) >= MIN_FILE_CHARACTERS
        and "\0" not in text
        and len(text) <= _MAX_MEAN_LINE_CHARACTERS * lines
    )


def _find_lines(text: str) -> Iterator[Span]:
    start = 0
    for line in text.split("\n"):
        code = line.strip()
        if code and len(line) <= _MAX_LINE_CHARACTERS:
            begin = start + line.index(code[0])
            yield begin, start + len(line)
        start += len(line) + 1


def _python_tokens(text: str) -> Iterator[tuple[tokenize.TokenInfo, int]]:
    """Yield Python's tokens up to a syntax error, with the position where each starts."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
            begin = starts[token.start[0] - 1] + token.start[1]
            if text.startswith(token.string, begin):  # a form feed can shift columns
                yield token, begin
    except (tokenize.TokenError, SyntaxError):
        return


def _find_python_words(text: str) -> Iterator[Span]:
    for token, begin in _python_tokens(text):
        if token.type == tokenize.NAME and len(token.string) >= _MIN_WORD_CHARACTERS:
            yield begin, begin + len(token.string)


def _find_python_places(text: str) -> tuple[list[int], list[int]]:
    ends: list[int] = []
    blanks: list[int] = []
    depth, decorator, last = 0, False, ""
    for token, begin in _python_tokens(text):
        if token.type == tokenize.NEWLINE:
            if last not in (":", "") and not decorator and text[begin - 1 : begin].strip():
                ends.append(begin)
            decorator, last = False, ""
        elif token.type == tokenize.NL:
            if depth == 0 and not token.line.strip():
                blanks.append(begin)
        elif token.type in (tokenize.INDENT, tokenize.DEDENT):
            continue
        elif token.type == tokenize.COMMENT:
            last = ""  # a caret after a comment is inside it
        else:
            decorator |= not last and token.string == "@"
            depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
            last = token.string
    return ends, blanks


def _find_places(text: str, language: _Language) -> tuple[list[int], list[int]]:
    """Find ``SourceFile.complete_places`` line by line, by brackets and each line's last sign."""
    # Strings and comments are no code; their line breaks are hidden, too.
    code = re.sub(language.ignored, lambda match: "\0" * len(match[0]), text, flags=re.DOTALL)
    ends: list[int] = []
    blanks: list[int] = []
    depth = position = 0
    for line in code.split("\n"):
        depth += len(re.findall(r"[(\[]", line)) - len(re.findall(r"[)\]]", line))
        position += len(line)
        if depth <= 0 and position < len(text):
            if not line.strip():
                blanks.append(position)
            elif line[-1] in language.statement_ends:
                ends.append(position)
        position += 1
    return ends, blanks
