"""Files inside filled-in templates: what a client shows the model beside the document.

Families trained on whole repositories have tokens for them::

    REPO name NL (SEP path NL text)* SEP path NL  PRE prefix SUF suffix MID

Some clients put files after PRE instead, in front of the document's text, and Codestral's have
``+++++ path`` there. CodeGeeX has ``###PATH:path`` lines in a chat. Where a family has no form for
files, Continue puts them in comments after PRE: ``# Path: path``, the lines of the file, and in the
end the document's own path. A name counts as a path only if it looks like one; a file's text that
happens to begin with such a token stays text.
"""

import re
from dataclasses import dataclass

from midfill.infill.context import ContextFile

_BOS = re.compile(
    r"(?:<s>|<bos>|<\|endoftext\|>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>"  # noqa: RUF001
    r"|<\[begin▁of▁sentence\]>|\[gMASK\]<sop>)*"
)
# One word, or several with a folder and a name with an extension; nothing that code has.
_PATH = re.compile(
    r"(?!#|\*|//)(?:[^\s(){}\[\]<>=;,\"'`|]*[^\s(){}\[\]<>=;,\"'`|:]"
    r"|[^(){}<>=;\"`|\n]*/[^(){}<>=;\"`|\n]*\.\w+)"
)
_FILE_NAME = re.compile(r"[\w./\\+-]+\.\w+")  # without any blank
_MAX_PATH = 400  # characters
_STARS = "<gh_stars>"  # StarCoder has a repository's stars after a path
_CODESTRAL, _CODESTRAL_FILE = "[SUFFIX]", "+++++ "
_CODEGEEX = "<|code_suffix|>"
_CHAT = re.compile(r"\s*<\|user\|>\n")
_REFERENCE = re.compile(r"^###REFERENCE:\n###PATH:(.*)\n", re.MULTILINE)
_DOCUMENT = re.compile(r"^###PATH:(.*)\n###LANGUAGE:.*\n###MODE:.*\n\Z", re.MULTILINE)
# What twinny puts before Codestral's template: a comment with the path of an open file, and it.
_TWINNY = re.compile(r"\W{0,4}?\s*// File: (.*)\n\s*// Content: *\n ?")
_COMMENTED = re.compile(r"([^\w\s]{1,3}) Path: ")  # with the comment's mark


@dataclass(frozen=True, slots=True)
class LeadingFiles:
    """What precedes the document's text in a template.

    Attributes:
        bos: the BOS token at its beginning; "" if there is none.
        context: other files.
        path: the document's own path; "" if unknown.
        repository: the repository's name; "" if unknown.
        ends_open: whether it ends with a separator that no path follows.
        is_chat: whether it opens a chat turn.
    """

    bos: str = ""
    context: tuple[ContextFile, ...] = ()
    path: str = ""
    repository: str = ""
    ends_open: bool = False
    is_chat: bool = False


def parse_lead(
    lead: str, separators: tuple[str, ...], repositories: tuple[str, ...], suffix: str
) -> LeadingFiles | None:
    """Return what the text before the first sentinel says; None if it is something else.

    Args:
        lead: the text.
        separators, repositories, suffix: see ``template.Spelling``.
    """
    begins = _BOS.match(lead)
    assert begins is not None
    bos, rest = begins.group(), lead[begins.end() :]
    if not rest.strip():
        return LeadingFiles(bos)
    if suffix == _CODEGEEX:
        return _parse_chat(bos, rest)
    if suffix == _CODESTRAL:
        return _parse_twinny(bos, rest)
    rest, repository = _take_repository(rest, separators, repositories)
    if not rest:
        return LeadingFiles(bos, repository=repository)
    if not separators or not rest.startswith(separators):
        return None
    *others, last = re.split("|".join(map(re.escape, separators)), rest)[1:]
    path, text = _take_path(last)
    files = [_context_file(*_take_path(one)) for one in others]
    if text.strip():
        files.append(_context_file(path, text))
        path = ""
    present = tuple(file for file in files if file is not None)
    return LeadingFiles(bos, present, path, repository, ends_open=not last)


def split_prefix(
    prefix: str,
    separators: tuple[str, ...],
    repositories: tuple[str, ...],
    suffix: str,
    *,
    path_follows: bool,
) -> tuple[LeadingFiles, str]:
    """Return what the text after PRE says of files, and the document's text after that.

    Args:
        prefix: the text.
        separators, repositories, suffix: see ``template.Spelling``.
        path_follows: whether the text may begin with the document's path and nothing before it, as
            StarCoder2's does after an open separator.
    """
    plain = LeadingFiles(), prefix
    if commented := _split_comments(prefix):
        return commented
    if suffix == _CODESTRAL:
        separators = (_CODESTRAL_FILE,)
    rest, repository = _take_repository(prefix, separators, repositories)
    if separators and rest.startswith(separators):
        pattern = "|".join(map(re.escape, separators))
        *others, last = re.split(f"^(?:{pattern})", rest, flags=re.MULTILINE)[1:]
        sections = [_take_path(one) for one in (*others, last)]
        if not sections[0][0]:
            return plain
        files = [_context_file(*one) for one in sections[:-1]]
        path, text = sections[-1]
        present = tuple(file for file in files if file is not None)
        return LeadingFiles("", present, path, repository), text
    if path_follows:
        first, newline, text = prefix.partition("\n")
        if newline and _FILE_NAME.fullmatch(first):
            return LeadingFiles(path=first), text
    return plain


def _take_repository(
    text: str, separators: tuple[str, ...], repositories: tuple[str, ...]
) -> tuple[str, str]:
    """Return a text without the repository at its beginning, and the repository's name."""
    token = next((one for one in repositories if text.startswith(one)), None)
    if token is None:
        return text, ""
    pattern = "|".join(["\n", *map(re.escape, separators)])
    end = re.compile(pattern).search(text, len(token))
    if end is None:
        return "", text[len(token) :].strip()
    name = text[len(token) : end.start()].strip()
    return text[end.start() :].lstrip("\n"), name


def _take_path(section: str) -> tuple[str, str]:
    """Return the path that a section begins with, "" if it begins with text, and the text."""
    first, newline, text = section.partition("\n")
    path = first.partition(_STARS)[0].strip()
    if newline and 0 < len(path) <= _MAX_PATH and _PATH.fullmatch(path):
        return path, text
    return "", section


def _context_file(path: str, text: str) -> ContextFile | None:
    """Return a file; None if there is nothing in it."""
    return ContextFile(f"{text.rstrip()}\n", path) if text.strip() else None


def _parse_chat(bos: str, lead: str) -> LeadingFiles | None:
    """Return what CodeGeeX's header says, with or without the turn that it opens."""
    turn = _CHAT.match(lead)
    text = lead[turn.end() :] if turn else lead
    document = _DOCUMENT.search(text)
    if document is None:
        return LeadingFiles(bos, is_chat=True) if turn and not text else None
    before, *references = _REFERENCE.split(text[: document.start()])
    if before.strip():
        return None
    files = [
        _context_file(path.strip(), body)
        for path, body in zip(references[::2], references[1::2], strict=True)
    ]
    present = tuple(file for file in files if file is not None)
    return LeadingFiles(bos, present, document[1].strip(), is_chat=turn is not None)


def _parse_twinny(bos: str, lead: str) -> LeadingFiles | None:
    if not _TWINNY.match(lead):
        return None
    _, *found = _TWINNY.split(lead)
    files = [
        _context_file(path.strip(), body)
        for path, body in zip(found[::2], found[1::2], strict=True)
    ]
    return LeadingFiles(bos, tuple(file for file in files if file is not None))


def _split_comments(prefix: str) -> tuple[LeadingFiles, str] | None:
    """Return the files in the comments that a text begins with, and the document's text after."""
    begins = _COMMENTED.match(prefix)
    if begins is None:
        return None
    mark, at = f"{begins[1]} ", 0
    files: list[tuple[str, list[str]]] = []
    while prefix.startswith(mark, at):
        end = prefix.find("\n", at)
        if end < 0:
            return None
        line, at = prefix[at + len(mark) : end], end + 1
        if line.startswith("Path: "):
            files.append((line.removeprefix("Path: ").strip(), []))
        elif _FILE_NAME.fullmatch(line) and _belongs(line, files):
            shown = [_context_file(path, "\n".join(lines)) for path, lines in files]
            context = tuple(file for file in shown if file is not None)
            return LeadingFiles("", context, line), prefix[at:]
        else:
            files[-1][1].append(line)
    return None


def _belongs(path: str, files: list[tuple[str, list[str]]]) -> bool:
    """Return whether a name may be that of the document to which these files are shown."""
    return "/" in path or any(
        path.rpartition(".")[2] == name.rpartition(".")[2] for name, _ in files
    )
