"""The documentation's fenced blocks, and the commands in those for the shell.

A block that no test can run says so in the page, in the paragraph after it:
``*Not run by the tests: REASON.*``
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    + [page for folder in ("docs", "src", "examples") for page in (ROOT / folder).rglob("*.md")]
)

_FENCE = re.compile(r"^( *)```(\S*)([^\n]*)\n(.*?)^\1```$\n?", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"\s*\*Not run by the tests: (.+)\.\*\n")
# Columns after the first words are what a program prints.
_COMMAND = re.compile(
    r"^(?:\$ |(?:\.venv/bin/)?(?:midfill|make|pip|python|curl|git) (?!\S+ {2,}[^ #]))", re.MULTILINE
)
_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the page's path in the repository.
        line: number of the line with its first fence.
        language: as named after the fence. Blocks that name none are sh if a line of theirs is a
            command, and text otherwise.
        text: what is between the fences, without the fences' own indentation.
        not_run: why no test runs it; "" if tests do.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class ShellCommand:
    """A command of a block for the shell.

    Attributes:
        block: where it stands.
        words: program and arguments, quotes and comments removed.
    """

    block: Block
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program's name without its folder."""
        return Path(self.words[0]).name

    def __str__(self) -> str:
        return f"{self.block.page}:{self.block.line}: {shlex.join(self.words)[:60]}"


def blocks_of(text: str, page: str = "") -> Iterator[Block]:
    """Yield the fenced blocks of a page's text."""
    for found in _FENCE.finditer(text):
        indent, language, _, inside = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        reason = _NOT_RUN.match(text, found.end())
        inside = re.sub(rf"^{indent}", "", inside, flags=re.MULTILINE)
        if not language:
            language = "sh" if has_commands(inside) else "text"
        yield Block(page, line, language, inside, reason[1] if reason else "")


def has_commands(text: str) -> bool:
    """Return whether a line of a text is a command for the shell."""
    return _COMMAND.search(text) is not None


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages; without one, in all."""
    return [
        block
        for page in PAGES
        for block in blocks_of(page.read_text("utf-8"), page.relative_to(ROOT).as_posix())
        if not languages or block.language in languages
    ]


def shell_commands(block: Block) -> list[ShellCommand]:
    """Return the commands of a block, those after ``&&``, ``;`` and ``|`` too."""
    text = "\n".join(_COMMENT.sub("", line) for line in block.text.splitlines())
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="\n;&|")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("\n;&|"):
            commands.append([])
        elif commands[-1] or not re.match(r"[A-Z_]+=", word):
            commands[-1].append(word)
    return [ShellCommand(block, _without_redirection(words)) for words in commands if words]


def _without_redirection(words: list[str]) -> tuple[str, ...]:
    """Return a command's words up to ``>``, behind which it says where its output goes."""
    return tuple(words[: words.index(">")] if ">" in words else words)
