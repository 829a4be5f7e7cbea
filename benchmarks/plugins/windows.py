"""Plugins that send a window around the caret and nothing else.

The windows are those of minuet-ai.nvim 479487c (lua/minuet/utils.lua), twinny 193d14c
(src/extension/utils.ts) and Zed (crates/edit_prediction/src/fim.rs: whole lines within 512 tokens,
which it takes to have three bytes each, alternately above and below the caret's; that it extends
the window to the ends of syntax nodes is left out). ``Whole`` is a client without a window.
"""

from benchmarks.plugins.plugin import COMPLETIONS, Asking, Sent, first_lines, last_lines
from midfill.lab.bench.edits.editor import Round


class Whole:
    """Sends whole documents."""

    def ask(self, one: Round, answer: str) -> Asking:
        body = {"prompt": one.prefix, "suffix": one.suffix, "max_tokens": 64, "temperature": 0}
        yield Sent(COMPLETIONS, body, answer)


class LanguageServer:
    """``midfill lsp``: whole documents, and a warm-up where the user starts to type elsewhere."""

    def __init__(self) -> None:
        self._text: dict[str, str] = {}
        self._place: tuple[str, int] | None = None

    def ask(self, one: Round, answer: str) -> Asking:
        text, place = one.prefix + one.suffix, (one.document, one.prefix.count("\n"))
        last = self._place
        near = last is not None and last[0] == place[0] and abs(last[1] - place[1]) <= 1
        changed = self._text.get(one.document, text) != text
        body = {
            "prompt": one.prefix,
            "suffix": one.suffix,
            "max_tokens": 64,
            "temperature": 0,
            "n": 1,
            "midfill": {"document": f"file:///{one.document}", "lines": "block"},
        }
        if last is not None and changed and not near:
            yield Sent(COMPLETIONS, {**body, "max_tokens": 1}, answer)
        self._text[one.document], self._place = text, place
        yield Sent(COMPLETIONS, body, answer)


class Minuet:
    """16,000 characters, 3:1, behind a header; three equal requests at once."""

    window, before = 16_000, 12_000
    header = "# language: python\n# indentation: use 4 spaces for a tab\n"

    def ask(self, one: Round, answer: str) -> Asking:
        prefix, suffix = one.prefix, one.suffix
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

    def ask(self, one: Round, answer: str) -> Asking:
        above, below = one.prefix.count("\n"), one.suffix.count("\n") + 1
        before, after = self.before, self.lines - self.before
        if before > above:
            before, after = above, after + before - above
        if after > below:
            before, after = before + after - below, below
        prefix = last_lines(one.prefix, before)
        suffix = "".join(one.suffix.splitlines(keepends=True)[:after])
        uri = f"file:///home/user/project/{one.document}"
        header = f"\n# Language: Python (python) \n# File uri: {uri} (python) \n"
        prompt = f"<PRE> \n{header}{prefix} <SUF> {suffix} <MID>"
        body = {"prompt": prompt, "stream": True, "temperature": 0.2, "max_tokens": 512}
        yield Sent("/completion", body, answer)


class Zed:
    """512 tokens of whole lines in a template that its user has chosen."""

    tokens, bytes_per_token = 512, 3

    def ask(self, one: Round, answer: str) -> Asking:
        before, after = self._lines(one)
        prefix, suffix = last_lines(one.prefix, before), first_lines(one.suffix, after)
        stop = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
        prompt = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
        body = {"model": "", "prompt": prompt, "max_tokens": 64, "stop": stop}
        yield Sent(COMPLETIONS, body, answer)

    def _lines(self, one: Round) -> tuple[int, int]:
        """Return how many lines above and below the caret's are sent."""
        above, below = one.prefix.split("\n"), one.suffix.split("\n")
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
