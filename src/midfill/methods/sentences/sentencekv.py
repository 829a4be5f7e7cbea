"""SentenceKV: rows read the sentences whose mean key suits the sentence being written.

Source: Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching",
COLM 2025, arXiv 2504.00970. The prompt is pruned once, as SnapKV prunes it, but to several times
what a row reads; the rest waits outside the KV pool, and each row fetches the difference between
its sentences and those of the row before it.

Where the reference keeps a list per query head, here the query heads of a KV head choose together.
A row chooses by the mean query of the rows before it in its sentence, its own left out: so what it
reads is known before the step, which never waits for it. A sentence's first rows, ``warmup``, have
no query yet. They choose by the last one, or read everything that is retained, as the reference
does (``warm=all``); then all of it stays in the pool.
"""

from dataclasses import dataclass

from midfill.errors import InvalidRequestError
from midfill.methods.budget import check_observation, require
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.methods.sentences.method import ChosenSentences, EndTokens
from midfill.methods.sentences.selection import SentenceRule, end_tokens
from midfill.methods.served_model import ServedModel

NAME = "sentencekv"
WARM = ("reuse", "all")
UNITS = ("sentence", "line")


@dataclass(frozen=True)
class SentenceKV:
    """The method's hyper-parameters.

    Attributes:
        budget: keys that a row reads; the paper's tau, 128.
        keep: times ``budget`` tokens are retained of a prompt, per layer and KV head; the
            reference's r, 5.
        start, recent: first and last keys that every row reads; the reference's 32 and 32.
        window: the prompt's last rows, which vote for what is retained; the reference's 32.
        kernel: width of the pooling of votes; the reference's 7.
        warmup: first rows of a sentence, whose queries don't say yet what it is about; the
            reference's 1.
        warm: what these read: "reuse" what the last query finds, "all" everything.
        unit: what ends a unit of text: "sentence" is the reference's punctuation, "line" any
            newline, for source code.
    """

    budget: int = 128
    keep: float = 5
    start: int = 32
    recent: int = 32
    window: int = 32
    kernel: int = 7
    warmup: int = 1
    warm: str = "reuse"
    unit: str = "sentence"

    def __post_init__(self) -> None:
        check_observation(self.window, self.kernel)
        for name, least in (("start", 0), ("recent", 1), ("warmup", 1)):
            value = getattr(self, name)
            require(value >= least, f"{name} must be at least {least}, not {value}")
        require(
            self.budget > self.start + self.recent,
            f"budget must be above the {self.start + self.recent} tokens of start and recent,"
            f" not {self.budget}",
        )
        require(1 <= self.keep < 1e6, f"keep must be at least 1, not {self.keep:g}")
        require(
            self.keep * self.budget > self.window,
            f"keep * budget must be above the window's {self.window} tokens,"
            f" not {self.keep * self.budget:g}",
        )
        require(self.warm in WARM, f"warm must be reuse or all, not {self.warm!r}")
        require(self.unit in UNITS, f"unit must be sentence or line, not {self.unit!r}")

    @property
    def rule(self) -> SentenceRule:
        """How much is retained and read."""
        return SentenceRule(
            self.budget, int(self.keep * self.budget), self.start, self.recent, self.window,
            self.kernel, self.warmup, self.warm == "all",
        )  # fmt: skip

    def for_model(self, model: ServedModel) -> ChosenSentences:
        """See ``ModelSpecific.for_model``."""
        refuse_windows(NAME, model.config)
        if model.token_bytes is None:
            raise InvalidRequestError(
                f"{NAME} finds sentences by the text of tokens, which this engine was not given",
                param="method",
            )
        ends = end_tokens(model.token_bytes, model.config.vocab, lines=self.unit == "line")
        return ChosenSentences(self.rule, EndTokens(ends))
