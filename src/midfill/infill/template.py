"""Templates: raw prompts in which a client has filled in a FIM format itself, of any family.

Many editors choose a template by the model's name and send ``PRE prefix SUF suffix MID`` as one
text. Such a prompt is planned like any other request for infilling, in the served model's own
format. It is recognised strictly, since texts about FIM mention sentinels, too:

* It begins with the family's first sentinel. Only its BOS token, blanks, and files in the family's
  own form may precede it.
* Each sentinel occurs once, with PRE before SUF and MID after both, or SUF before PRE before MID.
  Text after MID is text before the caret (the SPM variant of prefix-first families).
* Prompts for next-edit models are none: some use sentinels, but the answer is an edited region.

A suffix-first prompt in the sentinels of the served model itself, if that is prefix-first by its
vocabulary, is not taken for a template either: models exist that share a vocabulary and not its
order. Other tokens inside the texts are text.

Families trained on whole repositories have tokens for files that a client shows the model beside
the document::

    REPO name NL (SEP path NL text)* SEP path NL  PRE prefix SUF suffix MID

Some clients put files after PRE instead, in front of the document's text, and Codestral's have
``+++++ path`` there. CodeGeeX has ``###PATH:path`` lines in a chat. Where a family has no form for
files, Continue puts them in comments after PRE: ``# Path: path``, the lines of the file, and in the
end the document's own path. A name counts as a path only if it looks like one; a file's text that
happens to begin with such a token stays text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from midfill.infill.context_files import ContextFile
from midfill.infill.formats import FAMILIES, Family, FimFormat, Order
from midfill.infill.request import InfillRequest

_SPACE_MARK = "▁"  # what SentencePiece writes for a blank
_ASSISTANT = "<|assistant|>"  # what ends a template inside a chat turn

# Cursors and editable regions, as Zed, Continue and others write them for Zeta, Zeta 2, Instinct
# and Mercury. Sweep's prompts have no sentinels.
_NEXT_EDIT = re.compile(
    r"<\|(?:user_cursor|editable_region_|marker_|code_to_edit)|^<{7} CURRENT$", re.MULTILINE
)

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
class Spelling:
    """How clients write the sentinels of some families, and what may stand beside them.

    Attributes:
        prefix, suffix, middle: the sentinels; ``middle`` is None where there is none.
        separators, repositories: tokens before each file's path, and before a repository's name.
        spaced: whether a blank, or SentencePiece's mark for it, may stand before each sentinel,
            and one blank after the first; these are not part of the texts.
    """

    prefix: str
    suffix: str
    middle: str | None
    separators: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()
    spaced: bool = False

    @property
    def sentinels(self) -> tuple[str, str, str | None]:
        """What tells spellings apart."""
        return self.prefix, self.suffix, self.middle


@dataclass(frozen=True, slots=True)
class FilledTemplate:
    """The parts of a raw prompt.

    Attributes:
        sentinel: its first sentinel, as it is written.
        bos: the BOS token before that, "" if there is none.
        prefix: all text before the caret: what followed PRE, then what followed MID.
        suffix: text after the caret.
        context_files, path, repository: the files it shows, see ``InfillRequest``.
        is_own: whether the sentinels are those of the served model.
    """

    sentinel: str
    bos: str
    prefix: str
    suffix: str
    context_files: tuple[ContextFile, ...] = ()
    path: str = ""
    repository: str = ""
    is_own: bool = False


def read_template(request: InfillRequest, format: FimFormat | None) -> InfillRequest:
    """Return the request that a raw prompt stands for if it is a template.

    Otherwise its layout becomes "verbatim", so it is not searched for a template again.

    Files in a template are snippets, unless the request names files, too: the client has chosen
    them by itself, for another model's context.
    """
    if not request.raw or request.layout == "verbatim":
        return request
    filled = parse_template(request.prefix, format)
    if filled is None:
        return replace(request, layout="verbatim")
    return replace(
        request,
        prefix=filled.prefix,
        suffix=filled.suffix,
        raw=False,
        context_files=(*request.context_files, *filled.context_files),
        snippets=not request.context_files,
        path=request.path or filled.path,
        repository=request.repository or filled.repository,
        template=filled.sentinel,
        # A tokenizer that adds no BOS token gets the one that the client wrote.
        bos=filled.bos if filled.is_own else "",
    )


def parse_template(prompt: str, format: FimFormat | None) -> FilledTemplate | None:
    """Return the parts of a raw prompt, or None if it is no filled-in template.

    Args:
        prompt: the prompt.
        format: the served model's format; None for a model without sentinels.
    """
    own = None if format is None else _own_spelling(format)
    own_order = "spm" if format is None else format.order
    if own is not None and (filled := _parse(prompt, own, own_order)) is not None:
        return replace(filled, is_own=True)
    for spelling in SPELLINGS:
        if own is None or spelling.sentinels != own.sentinels:
            filled = _parse(prompt, spelling, "spm")
            if filled is not None:
                return filled
    return None


def sentinel_texts() -> frozenset[str]:
    """Return every known family's sentinels and end tokens, as clients write them."""
    return _SENTINEL_TEXTS


class _Parts(NamedTuple):
    lead: str
    prefix: str
    suffix: str
    tail: str  # after the last sentinel


def _parse(prompt: str, spelling: Spelling, order: Order) -> FilledTemplate | None:
    """Return the parts of a prompt in one spelling; suffix-first only where ``order`` is "spm"."""
    parts = _split(prompt, spelling)
    if parts is None or (order == "psm" and parts[0] == "spm"):
        return None
    found, (lead, prefix, suffix, tail) = parts
    files = _parse_lead(lead, spelling)
    if files is None:
        return None
    if files.is_chat:
        tail = tail.removeprefix(_ASSISTANT).removeprefix("\n")
    if found == "spm" and tail:
        return None  # suffix-first families never continue a text after MID
    if _NEXT_EDIT.search(prompt):
        return None
    inside, prefix = _split_prefix(prefix, spelling, path_follows=files.ends_open)
    return FilledTemplate(
        spelling.prefix if found == "psm" else spelling.suffix,
        files.bos,
        prefix + tail,
        suffix,
        (*files.context_files, *inside.context_files),
        inside.path or files.path,
        inside.repository or files.repository,
    )


def _split(prompt: str, spelling: Spelling) -> tuple[Order, _Parts] | None:
    """Return a prompt's order and parts if each sentinel occurs once and at its place."""
    prefix, suffix = _place(prompt, spelling.prefix), _place(prompt, spelling.suffix)
    if prefix is None or suffix is None:
        return None
    middle = (len(prompt), len(prompt))
    if spelling.middle is not None:
        place = _place(prompt, spelling.middle)
        if place is None or place[0] < max(prefix[0], suffix[0]):
            return None
        middle = place
    elif prefix < suffix:
        return None  # families without MID continue right after the prefix
    if spelling.spaced:
        prefix, suffix, middle = (_with_blank(prompt, *place) for place in (prefix, suffix, middle))
        if prompt.startswith(" ", prefix[1]):
            prefix = prefix[0], prefix[1] + 1
    tail = prompt[middle[1] :]
    if prefix < suffix:
        before, after = prompt[prefix[1] : suffix[0]], prompt[suffix[1] : middle[0]]
        return "psm", _Parts(prompt[: prefix[0]], before, after, tail)
    before, after = prompt[prefix[1] : middle[0]], prompt[suffix[1] : prefix[0]]
    return "spm", _Parts(prompt[: suffix[0]], before, after, tail)


def _place(prompt: str, sentinel: str) -> tuple[int, int] | None:
    """Return where a sentinel begins and ends; None unless it occurs exactly once."""
    at = prompt.find(sentinel)
    if at < 0 or prompt.find(sentinel, at + 1) >= 0:
        return None
    return at, at + len(sentinel)


def _with_blank(prompt: str, start: int, end: int) -> tuple[int, int]:
    """Return a sentinel's place with the blank before it, which is its own."""
    spaced = start < end and prompt[start - 1 : start] in (" ", _SPACE_MARK)
    return start - spaced, end


def _written(token: str) -> str:
    """Return a sentinel without SentencePiece's mark, for which clients write a blank."""
    return token.removeprefix(_SPACE_MARK)


def _spelling(family: Family) -> Spelling:
    return Spelling(
        prefix=_written(family.prefix),
        suffix=_written(family.suffix),
        middle=None if family.middle is None else _written(family.middle),
        separators=(family.file_separator,) if family.file_separator else (),
        repositories=(family.repository,) if family.repository else (),
        spaced=family.prefix.startswith(_SPACE_MARK),
    )


def _grouped(spellings: list[Spelling]) -> tuple[Spelling, ...]:
    """Return one spelling for all families with the same sentinels."""
    groups: dict[tuple[str, str, str | None], Spelling] = {}
    for spelling in spellings:
        first = groups.get(spelling.sentinels, spelling)
        separators = dict.fromkeys((*first.separators, *spelling.separators))
        repositories = dict.fromkeys((*first.repositories, *spelling.repositories))
        groups[spelling.sentinels] = replace(
            first, separators=tuple(separators), repositories=tuple(repositories)
        )
    return tuple(groups.values())


SPELLINGS = _grouped([_spelling(family) for family in FAMILIES])
"""How clients write templates: one entry per set of sentinels."""


@lru_cache(maxsize=64)
def _own_spelling(format: FimFormat) -> Spelling:
    """Return how the sentinels of the served model are written in a raw prompt."""
    own = Spelling(
        prefix=_written(format.prefix.text),
        suffix=_written(format.suffix.text),
        middle=None if format.middle is None else _written(format.middle.text),
        separators=(format.file_separator.text,) if format.file_separator else (),
        repositories=(format.repository.text,) if format.repository else (),
        spaced=format.prefix.text.startswith(_SPACE_MARK),
    )
    others = [spelling for spelling in SPELLINGS if spelling.sentinels == own.sentinels]
    return _grouped([own, *others])[0]


def _end_texts(family: Family) -> tuple[str | None, ...]:
    return (
        *(family.prefix, family.suffix, family.middle),
        *(family.repository, family.file_separator, *family.stop),
    )


_SENTINEL_TEXTS = frozenset(
    [
        *(
            text
            for family in FAMILIES
            for token in _end_texts(family)
            if token
            for text in (token, _written(token))
        ),
        # Further tokens that editors send as stop strings with their templates.
        *("<s>", "<bos>", "<|begin_of_text|>", "<|im_start|>", "<|user|>", "<|assistant|>"),
        *("<|end_of_turn|>", "<end_of_turn>", "<|cursor|>", "<[PAD▁TOKEN]>", "<[SEP▁TOKEN]>"),
        *("<[begin▁of▁sentence]>", "<[end▁of▁sentence]>", "<｜begin▁of▁sentence｜>"),  # noqa: RUF001
        # DeepSeek's tokens with blanks for their marks, as twinny writes them.
        *("<｜fim begin｜>", "<｜fim hole｜>", "<｜fim end｜>", "<｜end of sentence｜>"),  # noqa: RUF001
    ]
)


@dataclass(frozen=True, slots=True)
class LeadingFiles:
    """What precedes the document's text in a template.

    Attributes:
        bos: the BOS token at its beginning; "" if there is none.
        context_files: other files.
        path: the document's own path; "" if unknown.
        repository: the repository's name; "" if unknown.
        ends_open: whether it ends with a separator that no path follows.
        is_chat: whether it opens a chat turn.
    """

    bos: str = ""
    context_files: tuple[ContextFile, ...] = ()
    path: str = ""
    repository: str = ""
    ends_open: bool = False
    is_chat: bool = False


def _parse_lead(lead: str, spelling: Spelling) -> LeadingFiles | None:
    """Return what the text before the first sentinel says; None if it is something else."""
    begins = _BOS.match(lead)
    assert begins is not None
    bos, rest = begins.group(), lead[begins.end() :]
    if not rest.strip():
        return LeadingFiles(bos)
    if spelling.suffix == _CODEGEEX:
        return _parse_chat(bos, rest)
    if spelling.suffix == _CODESTRAL:
        return _parse_twinny(bos, rest)
    separators = spelling.separators
    rest, repository = _take_repository(rest, separators, spelling.repositories)
    if not rest:
        return LeadingFiles(bos, repository=repository)
    if not separators or not rest.startswith(separators):
        return None
    *others, last = re.split("|".join(map(re.escape, separators)), rest)[1:]
    path, text = _take_path(last)
    sections = [_take_path(section) for section in others]
    if text.strip():
        sections.append((path, text))
        path = ""
    return LeadingFiles(bos, _context_files(sections), path, repository, ends_open=not last)


def _split_prefix(
    prefix: str, spelling: Spelling, *, path_follows: bool
) -> tuple[LeadingFiles, str]:
    """Return what the text after PRE says of files, and the document's text after that.

    Args:
        prefix: the text.
        spelling: of the template's sentinels.
        path_follows: whether the text may begin with the document's path and nothing before it, as
            StarCoder2's does after an open separator.
    """
    plain = LeadingFiles(), prefix
    if commented := _split_comments(prefix):
        return commented
    separators = spelling.separators
    if spelling.suffix == _CODESTRAL:
        separators = (_CODESTRAL_FILE,)
    rest, repository = _take_repository(prefix, separators, spelling.repositories)
    if separators and rest.startswith(separators):
        pattern = "|".join(map(re.escape, separators))
        *others, last = re.split(f"^(?:{pattern})", rest, flags=re.MULTILINE)[1:]
        sections = [_take_path(section) for section in (*others, last)]
        if not sections[0][0]:
            return plain
        path, text = sections.pop()
        return LeadingFiles("", _context_files(sections), path, repository), text
    if path_follows:
        first, newline, text = prefix.partition("\n")
        if newline and _FILE_NAME.fullmatch(first):
            return LeadingFiles(path=first), text
    return plain


def _take_repository(
    text: str, separators: tuple[str, ...], repositories: tuple[str, ...]
) -> tuple[str, str]:
    """Return a text without the repository at its beginning, and the repository's name."""
    token = next((token_text for token_text in repositories if text.startswith(token_text)), None)
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


def _context_files(sections: Iterable[tuple[str, str]]) -> tuple[ContextFile, ...]:
    """Return the files of (path, text) each, without those that have nothing in them."""
    return tuple(
        ContextFile(f"{text.rstrip()}\n", path.strip()) for path, text in sections if text.strip()
    )


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
    files = _context_files(zip(references[::2], references[1::2], strict=True))
    return LeadingFiles(bos, files, document[1].strip(), is_chat=turn is not None)


def _parse_twinny(bos: str, lead: str) -> LeadingFiles | None:
    if not _TWINNY.match(lead):
        return None
    _, *found = _TWINNY.split(lead)
    return LeadingFiles(bos, _context_files(zip(found[::2], found[1::2], strict=True)))


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
            shown = _context_files((path, "\n".join(lines)) for path, lines in files)
            return LeadingFiles("", shown, line), prefix[at:]
        else:
            files[-1][1].append(line)
    return None


def _belongs(path: str, files: list[tuple[str, list[str]]]) -> bool:
    """Return whether a name may be that of the document to which these files are shown."""
    return "/" in path or any(
        path.rpartition(".")[2] == name.rpartition(".")[2] for name, _ in files
    )
