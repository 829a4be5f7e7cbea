"""What the generator takes from installed packages: functions, passages of documentation, prose."""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from midfill_lab.bench.documents import unseen_documents

_FILES = 400
_SHORTEST, _LONGEST = 4000, 60_000
"""Characters of a file."""
_LEAD = range(25, 100)
_BODY = range(60, 320)
_SENTENCE = range(40, 200)
_CODE = range(60, 300)
"""Characters of each."""
_CODE_LINES = range(3, 10)

_PROSE = re.compile(r"[A-Z][\w ,.;:()'\-]*\.")
_SECTION = re.compile(r"(?:Args|Arguments|Returns|Yields|Raises|Notes?|Examples?):|--")
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")


@dataclass(frozen=True)
class Function:
    """A function of a package.

    Attributes:
        description: the first sentence of its docstring, which the code lacks.
        code: its lines without its docstring, dedented; none of them is blank.
    """

    description: str
    code: str


@dataclass(frozen=True)
class Passage:
    """Documentation of one class or function.

    Attributes:
        lead: the first sentence of its docstring.
        body: what follows it.
    """

    lead: str
    body: str


@dataclass(frozen=True)
class PackageTexts:
    """What was found; nothing of a kind occurs twice.

    Attributes:
        functions, passages, sentences: in an order that the seed chooses.
        source: where it comes from, such as "numpy 2.4.0 and torch 2.13.0".
    """

    functions: tuple[Function, ...]
    passages: tuple[Passage, ...]
    sentences: tuple[str, ...]
    source: str


@lru_cache(maxsize=2)
def read_packages(seed: int, files: int = _FILES) -> PackageTexts:
    """Read files of installed packages that no shipped adapter was trained on.

    Args:
        seed: chooses the files and their order.
        files: how many.

    Raises:
        MidfillError: too few are installed.
    """
    documents = unseen_documents(files, seed=seed, shortest=_SHORTEST, longest=_LONGEST)
    functions: dict[str, Function] = {}
    passages: dict[str, Passage] = {}
    codes: set[str] = set()
    sentences: dict[str, None] = {}
    for text in documents.texts:
        for node, docstring in _documented(text):
            passage = find_passage(docstring)
            if passage is not None:
                passages.setdefault(passage.lead, passage)
            function = find_function(text, node, docstring)
            if function is not None and function.code not in codes:
                codes.add(function.code)
                functions.setdefault(function.description, function)
            sentences.update(dict.fromkeys(find_sentences(docstring)))
    return PackageTexts(
        tuple(functions.values()), tuple(passages.values()), tuple(sentences), documents.source
    )


def find_sentences(docstring: str) -> list[str]:
    """Return the plain sentences of a docstring; sections about arguments hold none."""
    paragraphs = (" ".join(part.split()) for part in docstring.split("\n\n"))
    return [
        sentence
        for paragraph in paragraphs
        if not _SECTION.search(paragraph)
        for sentence in _SENTENCE_END.split(paragraph)
        if len(sentence) in _SENTENCE and _PROSE.fullmatch(sentence)
    ]


def find_passage(docstring: str) -> Passage | None:
    """Return the passage in a docstring; None if it is no prose of a suitable length."""
    lead, body = _lead(docstring), ""
    if lead is None:
        return None
    rest = docstring[len(_first_paragraph(docstring)) :].strip()
    paragraph = " ".join(_first_paragraph(rest).split())
    if _SECTION.search(paragraph):
        return None
    for sentence in _SENTENCE_END.split(paragraph):
        if not _PROSE.fullmatch(sentence) or len(body) + len(sentence) >= _BODY.stop:
            break
        body = f"{body} {sentence}".strip()
    return Passage(lead, body) if len(body) in _BODY else None


def find_function(text: str, node: ast.AST, docstring: str) -> Function | None:
    """Return a function of a file; None if it is too long, too short, or not described.

    Args:
        text: the file.
        node: the definition.
        docstring: of the function, cleaned.
    """
    description = _lead(docstring)
    if description is None or not isinstance(node, ast.FunctionDef):
        return None
    quoted = node.body[0]
    assert quoted.end_lineno is not None
    assert node.end_lineno is not None
    if node.end_lineno - node.lineno > 120:
        return None
    lines = text.splitlines()
    kept = lines[node.lineno - 1 : quoted.lineno - 1] + lines[quoted.end_lineno : node.end_lineno]
    code = textwrap.dedent("\n".join(line.rstrip() for line in kept))
    fits = len(code) in _CODE and len(kept) in _CODE_LINES and code.isascii()
    if not fits or "\n\n" in code or not code.startswith("def "):
        return None
    return Function(description, code)


def _documented(text: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the classes and functions of a file that have docstrings, with these."""
    try:
        nodes: Iterable[ast.AST] = ast.walk(ast.parse(text))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node, docstring


def _first_paragraph(text: str) -> str:
    return text.partition("\n\n")[0]


def _lead(docstring: str) -> str | None:
    """Return the first sentence of a docstring; None if it is no plain one."""
    paragraph = " ".join(_first_paragraph(docstring).split())
    lead = _SENTENCE_END.split(paragraph)[0]
    return lead if len(lead) in _LEAD and _PROSE.fullmatch(lead) and lead.isascii() else None
