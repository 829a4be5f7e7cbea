"""Plugins: what each sends of what happens in an editor, and when.

Some send a window around the caret and nothing else, as minuet-ai.nvim 479487c
(lua/minuet/utils.lua), twinny 193d14c (src/extension/utils.ts) and Zed do
(crates/edit_prediction/src/fim.rs: whole lines within 512 tokens, which it takes to have three
bytes each, alternately above and below the caret's; that it extends the window to the ends of
syntax nodes is left out). ``Whole`` is a client without a window.

Tabby's agent sends 20 lines before and after the caret, with snippets of other files. Its window
and its limits are those of tabby-agent (clients/tabby-agent/src/codeCompletion, config/default.ts)
at 21b29048. It finds snippets with a full-text search over recently changed files, which counting
common words stands in for here; declarations, which take a language server, are left out.

Continue has 1024 tokens in a template of its own, other files first. From Continue d0a3c0b6
(core/autocomplete: templating, util/HelperVars.ts, snippets): up to 30% of the tokens before the
caret and 20% after it, whole lines; what is left is for the files that were opened last, the
beginning of each. Where they do not fit, they are shortened to what is left, to the token, so that
their ends move with every keystroke. Symbols of imports, which take a language server, are left
out.

llama.vim and llama.vscode are in ``llama_cpp.py``.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from benchmarks.layouts.cost import Tokenize
from midfill_lab.bench.editing import Round

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a plugin.

    Attributes:
        path: where it is sent.
        body: its JSON.
        answer: what the model writes.
        copies: how many equal requests are sent at once.
    """

    path: str
    body: Mapping[str, object]
    answer: str = ""
    copies: int = 1


Asking = Generator[Sent, str, None]
"""Yields requests, and gets the body of each response."""


class Plugin(Protocol):
    """A plugin in one session of its user; it may remember what it has seen."""

    def ask(self, edit: Round, answer: str) -> Asking:
        """Send what the plugin sends where the editor is in this state.

        Args:
            edit: the state, and what the user has just done.
            answer: what the model writes at the caret.
        """
        ...


class OtherFiles:
    """The files that were seen before, as they were then, the newest first."""

    def __init__(self) -> None:
        self._last: dict[str, Round] = {}

    def besides(self, edit: Round) -> list[Round]:
        """Record a state; return the last states of all other files."""
        self._last.pop(edit.document, None)
        others = list(reversed(self._last.values()))
        self._last[edit.document] = edit
        return others


def last_lines(prefix: str, count: int) -> str:
    """Return the caret's line up to the caret, and as many whole lines before it."""
    return "\n".join(prefix.split("\n")[-count - 1 :])


def first_lines(suffix: str, count: int) -> str:
    """Return the rest of the caret's line, and as many whole lines after it."""
    lines = suffix.split("\n")
    return "\n".join(lines[: count + 1]) + ("\n" if count + 1 < len(lines) else "")


class Whole:
    """Sends whole documents."""

    def ask(self, edit: Round, answer: str) -> Asking:
        body = {"prompt": edit.prefix, "suffix": edit.suffix, "max_tokens": 64, "temperature": 0}
        yield Sent(COMPLETIONS, body, answer)


class LanguageServer:
    """``midfill lsp``: whole documents, and a warm-up where the user starts to type elsewhere."""

    def __init__(self) -> None:
        self._text: dict[str, str] = {}
        self._place: tuple[str, int] | None = None

    def ask(self, edit: Round, answer: str) -> Asking:
        text, place = edit.prefix + edit.suffix, (edit.document, edit.prefix.count("\n"))
        last = self._place
        near = last is not None and last[0] == place[0] and abs(last[1] - place[1]) <= 1
        changed = self._text.get(edit.document, text) != text
        body = {
            "prompt": edit.prefix,
            "suffix": edit.suffix,
            "max_tokens": 64,
            "temperature": 0,
            "n": 1,
            "midfill": {"document": f"file:///{edit.document}", "lines": "block"},
        }
        if last is not None and changed and not near:
            yield Sent(COMPLETIONS, {**body, "max_tokens": 1}, answer)
        self._text[edit.document], self._place = text, place
        yield Sent(COMPLETIONS, body, answer)


class Minuet:
    """16,000 characters, 3:1, behind a header; three equal requests at once."""

    window, before = 16_000, 12_000
    header = "# language: python\n# indentation: use 4 spaces for a tab\n"

    def ask(self, edit: Round, answer: str) -> Asking:
        prefix, suffix = edit.prefix, edit.suffix
        if len(prefix) + len(suffix) > self.window:
            after = self.window - self.before
            if len(prefix) < self.before:
                suffix = suffix[: self.window - len(prefix)]
            elif len(suffix) < after:
                prefix = prefix[len(prefix) + len(suffix) - self.window :]
            else:
                prefix, suffix = prefix[-self.before :], suffix[:after]
        prompt = self.header + prefix
        body = {"model": "", "stream": True, "prompt": prompt, "suffix": suffix}
        yield Sent(COMPLETIONS, body, answer, copies=3)


class Twinny:
    """100 lines, 85% of them before the caret, behind a header, in CodeLlama's template."""

    lines, before = 100, 85

    def ask(self, edit: Round, answer: str) -> Asking:
        above, below = edit.prefix.count("\n"), edit.suffix.count("\n") + 1
        before, after = self.before, self.lines - self.before
        if before > above:
            before, after = above, after + before - above
        if after > below:
            before, after = before + after - below, below
        prefix = last_lines(edit.prefix, before)
        suffix = "".join(edit.suffix.splitlines(keepends=True)[:after])
        uri = f"file:///home/user/project/{edit.document}"
        header = f"\n# Language: Python (python) \n# File uri: {uri} (python) \n"
        prompt = f"<PRE> \n{header}{prefix} <SUF> {suffix} <MID>"
        body = {"prompt": prompt, "stream": True, "temperature": 0.2, "max_tokens": 512}
        yield Sent("/completion", body, answer)


class Zed:
    """512 tokens of whole lines in a template that its user has chosen."""

    tokens, bytes_per_token = 512, 3

    def ask(self, edit: Round, answer: str) -> Asking:
        before, after = self._lines(edit)
        prefix, suffix = last_lines(edit.prefix, before), first_lines(edit.suffix, after)
        stop = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
        prompt = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
        body = {"model": "", "prompt": prompt, "max_tokens": 64, "stop": stop}
        yield Sent(COMPLETIONS, body, answer)

    def _lines(self, edit: Round) -> tuple[int, int]:
        """Return how many lines above and below the caret's are sent."""
        above, below = edit.prefix.split("\n"), edit.suffix.split("\n")
        left = self.tokens - self._cost(above.pop() + below[0])
        waiting = [below[:0:-1], above]  # each with the next line at its end
        counts, open_sides = [0, 0], [0, 1]
        while open_sides:
            for side in list(open_sides):
                cost = self._cost(waiting[side].pop()) if waiting[side] else left + 1
                if cost > left:
                    open_sides.remove(side)
                else:
                    left -= cost
                    counts[side] += 1
        return counts[1], counts[0]

    def _cost(self, line: str) -> int:
        return max(1, -(-len(line.encode()) // self.bytes_per_token))


_LINES = 20
_CHUNK, _MAX_CHUNKS = 500, 3  # characters of a snippet, snippets from changed files
_OPENED = 5  # files
_WORD = re.compile(r"\w+")


class Tabby:
    """The agent; without ``snippets`` other files are closed."""

    def __init__(self, *, snippets: bool = True) -> None:
        self._snippets = snippets
        self._files = OtherFiles()

    def ask(self, edit: Round, answer: str) -> Asking:
        prefix = last_lines(edit.prefix, _LINES - 1)
        segments: dict[str, object] = {
            "prefix": prefix,
            "suffix": first_lines(edit.suffix, _LINES - 1),
            "filepath": f"src/{edit.document}",
            "git_url": "https://example.org/demo/project.git",
        }
        others = self._files.besides(edit) if self._snippets else []
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


_TOKENS, _PREFIX, _SUFFIX = 1024, 0.3, 0.2
_BUFFER = 10  # tokens for what is written around a snippet
_MIN_TOKENS = 125  # tokens of a shortened file
_FILES = 5
_STOP = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "/src/", "```"]


class Continue:
    """Continue, with a model whose name says that it is Qwen2.5-Coder, or with an unknown one.

    Args:
        tokenize: counts tokens.
        decode: ids to text.
        qwen: whether it takes the model for Qwen2.5-Coder; otherwise it uses StarCoder's template,
            with other files as comments before the document.
        snippets: whether other files are open.
    """

    def __init__(
        self,
        tokenize: Tokenize,
        decode: Callable[[list[int]], str],
        *,
        qwen: bool,
        snippets: bool = True,
    ) -> None:
        self._tokenize, self._decode = lru_cache(64)(tokenize), decode
        self._count = lru_cache(65_536)(lambda line: len(tokenize(line)))
        self._qwen, self._snippets = qwen, snippets
        self._files = OtherFiles()

    def ask(self, edit: Round, answer: str) -> Asking:
        prefix = self._pruned(edit.prefix, _TOKENS * _PREFIX, from_top=True)
        before = len(self._tokenize(prefix))
        suffix = self._pruned(edit.suffix, min(_TOKENS - before, _TOKENS * _SUFFIX), from_top=False)
        left = _TOKENS - len(self._tokenize(prefix + suffix))
        others = self._files.besides(edit) if self._snippets else []
        snippets = self._fitting(others, left)
        if self._qwen:
            prompt = _qwen_prompt(snippets, edit.document, prefix, suffix or "\n")
        else:
            prompt = _starcoder_prompt(snippets, edit.document, prefix, suffix or "\n")
        body = {
            "model": "", "max_tokens": 4096, "temperature": 0.01, "stop": _STOP,
            "prompt": prompt, "stream": True,
        }  # fmt: skip
        yield Sent(COMPLETIONS, body, answer)

    def _pruned(self, text: str, most: float, *, from_top: bool) -> str:
        """Return as many whole lines next to the caret as have at most so many tokens."""
        lines = text.split("\n")
        kept, left = 0, most
        for line in reversed(lines) if from_top else lines:
            left -= self._count(line) + (kept > 0)
            if left < 0:
                break
            kept += 1
        return "\n".join(lines[len(lines) - kept :] if from_top else lines[:kept])

    def _fitting(self, others: list[Round], left: int) -> list[tuple[str, str]]:
        """Return (path, text) of the other files that are sent."""
        files = [(edit.document, edit.prefix + edit.suffix) for edit in others]
        sizes = [len(self._tokenize(text)) for _, text in files]
        if sum(sizes) >= left - _BUFFER:
            files = self._shortened(_ranked(files), left)
        sent = []
        for path, text in files:
            size = len(self._tokenize(text)) + _BUFFER
            if size <= left:
                sent.append((path, text))
                left -= size
        return sent

    def _shortened(self, files: list[tuple[str, str]], left: int) -> list[tuple[str, str]]:
        count = min(len(files), max(0, (left - _BUFFER) // _MIN_TOKENS))
        shortened = []
        for place, (path, text) in enumerate(files[:count]):
            rest = count - place
            share = 2 / (rest + 1)
            most = math.floor(_MIN_TOKENS + share * (left - _BUFFER - rest * _MIN_TOKENS))
            ids = self._tokenize(text)[:most]
            shortened.append((path, self._decode(ids)))
            left -= len(ids)
        return shortened


def _ranked(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the files that count most, the newest and shortest first."""
    sizes = [math.log(max(len(text), 10)) for _, text in files]
    low, high = min(sizes), max(sizes)

    def score(place: int) -> float:
        short = 0.5 if low == high else 1 - (sizes[place] - low) / (high - low)
        return float(0.6 * 1.15**-place + 0.4 * short)

    best = sorted(range(len(files)), key=score, reverse=True)
    return [files[place] for place in best[:_FILES]]


def _qwen_prompt(files: list[tuple[str, str]], path: str, prefix: str, suffix: str) -> str:
    fim = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
    if not files:
        return fim
    shown = "\n".join(f"<|file_sep|>{name}\n{text}" for name, text in files)
    return f"<|repo_name|>project\n{shown}\n<|file_sep|>{path}\n{fim}"


def _starcoder_prompt(files: list[tuple[str, str]], path: str, prefix: str, suffix: str) -> str:
    shown = [_commented(f"Path: src/{name}\n{text}") for name, text in files]
    header = "\n".join(shown) + f"\n{_commented(f'src/{path}')}"
    return f"<fim_prefix>{header}\n{prefix}<fim_suffix>{suffix}<fim_middle>"


def _commented(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.strip().split("\n"))
