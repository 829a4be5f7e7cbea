"""Continue: 1024 tokens in a template of its own, other files first.

From Continue d0a3c0b6 (core/autocomplete: templating, util/HelperVars.ts, snippets): up to 30% of
the tokens before the caret and 20% after it, whole lines; what is left is for the files that were
opened last, the beginning of each. Where they do not fit, they are shortened to what is left, to
the token, so that their ends move with every keystroke. Symbols of imports, which take a language
server, are left out.
"""

import math
from collections.abc import Callable
from functools import lru_cache

from benchmarks.plugins.plugin import COMPLETIONS, Asking, OtherFiles, Sent
from midfill.lab.bench.edits.cost import Tokenize
from midfill.lab.bench.edits.editor import Round

_TOKENS, _PREFIX, _SUFFIX = 1024, 0.3, 0.2
_BUFFER = 10  # tokens for what is written around a snippet
_LEAST = 125  # tokens of a shortened file
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

    def ask(self, one: Round, answer: str) -> Asking:
        prefix = self._pruned(one.prefix, _TOKENS * _PREFIX, from_top=True)
        before = len(self._tokenize(prefix))
        suffix = self._pruned(one.suffix, min(_TOKENS - before, _TOKENS * _SUFFIX), from_top=False)
        left = _TOKENS - len(self._tokenize(prefix + suffix))
        others = self._files.besides(one) if self._snippets else []
        snippets = self._fitting(others, left)
        if self._qwen:
            prompt = _qwen_prompt(snippets, one.document, prefix, suffix or "\n")
        else:
            prompt = _starcoder_prompt(snippets, one.document, prefix, suffix or "\n")
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
        files = [(one.document, one.prefix + one.suffix) for one in others]
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
        count = min(len(files), max(0, (left - _BUFFER) // _LEAST))
        shortened = []
        for place, (path, text) in enumerate(files[:count]):
            rest = count - place
            share = 2 / (rest + 1)
            most = math.floor(_LEAST + share * (left - _BUFFER - rest * _LEAST))
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
