"""Tabby's agent: 20 lines before and after the caret, with snippets of other files.

Its window and its limits are those of tabby-agent (clients/tabby-agent/src/codeCompletion,
config/default.ts) at 21b29048. It finds snippets with a full-text search over recently changed
files, which counting common words stands in for here; declarations, which take a language server,
are left out.
"""

import re

from benchmarks.plugins.plugin import (
    COMPLETIONS,
    Asking,
    OtherFiles,
    Sent,
    first_lines,
    last_lines,
)
from midfill.lab.bench.edits.editor import Round

_LINES = 20
_CHUNK, _MAX_CHUNKS = 500, 3  # characters of a snippet, snippets from changed files
_OPENED = 5  # files
_WORD = re.compile(r"\w+")


class Tabby:
    """The agent; without ``snippets`` other files are closed."""

    def __init__(self, *, snippets: bool = True) -> None:
        self._snippets = snippets
        self._files = OtherFiles()

    def ask(self, one: Round, answer: str) -> Asking:
        prefix = last_lines(one.prefix, _LINES - 1)
        segments: dict[str, object] = {
            "prefix": prefix,
            "suffix": first_lines(one.suffix, _LINES - 1),
            "filepath": f"src/{one.document}",
            "git_url": "https://example.org/demo/project.git",
        }
        others = self._files.besides(one) if self._snippets else []
        if found := _search(others, prefix):
            segments["relevant_snippets_from_changed_files"] = found
        if others:
            viewed = [_viewed(other) for other in others[:_OPENED]]
            segments["relevant_snippets_from_recently_opened_files"] = viewed
        body = {"language": "python", "segments": segments, "user": "u", "temperature": None}
        yield Sent(COMPLETIONS, body, answer)


def _viewed(other: Round) -> dict[str, object]:
    """Return the part of a file that was seen last."""
    text, caret = other.prefix + other.suffix, len(other.prefix)
    start = max(0, caret - _CHUNK // 2)
    return {"filepath": f"src/{other.document}", "body": text[start : start + _CHUNK], "score": 1}


def _search(others: list[Round], prefix: str) -> list[dict[str, object]]:
    """Return the parts of other files that have most words in common with the text."""
    wanted = set(_WORD.findall(prefix))
    scored = []
    for other in others:
        text = other.prefix + other.suffix
        for start in range(0, len(text), _CHUNK):
            body = text[start : start + _CHUNK]
            words = _WORD.findall(body)
            share = sum(word in wanted for word in words) / (len(words) or 1)
            scored.append((share, f"src/{other.document}", body))
    scored.sort(key=lambda found: -found[0])
    return [
        {"filepath": path, "body": body, "score": share}
        for share, path, body in scored[:_MAX_CHUNKS]
    ]
