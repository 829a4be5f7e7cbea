"""EpiCache: a bounded prefill with one compressed cache per topic of a conversation.

Source: Kim et al., "EpiCache: Episodic KV Cache Management for Long Conversational Question
Answering", 2025, arXiv 2509.17396. A history is computed in blocks. After each, the keys that are
there are scored, by the queries of a prompt that is computed behind them and dropped again (an
instruction, and the conversation's windows that represent an episode), and the best stay. So no
more is ever held than the budget, a block and that prompt. Episodes are clusters of windows; a
question goes to the nearest one, whose cache is loaded, and it is dropped with its answer.

What differs: an episode's cache is computed when a question first comes to it, so episodes that
nobody asks about cost nothing. Where no sentence encoder is served, embeddings are weighted means
of the model's own input embeddings (``clustering.py``). Turns are found by token ids
(``turns.py``), whoever speaks. The first tokens, or the first turn, always stay. No template's text
stands between instruction and windows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.errors import InvalidRequestError
from midfill.methods.budget import check_budget, require
from midfill.methods.calibration_store import load_tables
from midfill.methods.episodes.method import EpisodeRule, EpisodicMethod, Scorer
from midfill.methods.episodes.turns import TurnReader
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.methods.served_model import ServedModel

NAME, VERSION = "epicache", 1
INSTRUCTION = (
    "Note the essential facts of this conversation: who speaks and what each of them is like,"
    " what happened and when, personal details, promises, opinions and memorable moments.\n"
)
_SCORERS: tuple[Scorer, ...] = ("episode", "summary", "window", "random")


@dataclass(frozen=True)
class EpiCache:
    """The method's hyper-parameters.

    Attributes:
        budget: keys kept per layer and KV head, on average, or a share of the history if below 1.
        block: tokens computed between two decisions; the code's 2048.
        episodes: clusters of the history, at most; the paper's 4.
        turns: turns per window; the paper's 4.
        near: windows at most that represent an episode, as far as they fit a block; the code's 4.
        alpha: how much more sensitive layers keep; the code's 1.1. 0 gives all layers the same, and
            needs no calibration.
        heads: "pooled" has a layer's KV heads compete for its keys, "equal" gives each as many.
        sinks: first tokens that always stay.
        system: 1: the first turn, a system prompt, stays whole instead.
        scorer: "episode", or another prompt that scores keys of a single cache: "summary" is the
            instruction alone, "window" each block's last 64 rows, "random" chance.
        grow: 1: only whole blocks are compressed, and what follows stays as it is, so that a
            conversation that grows is computed again only once per block.
        memory: host memory for the caches of all conversations, in MiB; those used least recently
            are forgotten.
    """

    budget: float = 512
    block: int = 512
    episodes: int = 4
    turns: int = 4
    near: int = 4
    alpha: float = 0.0
    heads: str = "pooled"
    sinks: int = 4
    system: int = 0
    scorer: str = "episode"
    grow: int = 0
    memory: int = 256

    def __post_init__(self) -> None:
        check_budget(self.budget, self.sinks)
        for name in ("block", "episodes", "turns", "near", "sinks", "memory"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, not {value}", NAME)
        require(0 <= self.alpha < np.inf, f"alpha must be 0 or more, not {self.alpha:g}", NAME)
        require(
            self.heads in ("pooled", "equal"),
            f"heads must be pooled or equal, not {self.heads!r}",
            NAME,
        )
        require(
            self.scorer in _SCORERS,
            f"scorer must be episode, summary, window or random, not {self.scorer!r}",
            NAME,
        )
        for name in ("system", "grow"):
            value = getattr(self, name)
            require(value in (0, 1), f"{name} must be 0 or 1, not {value}", NAME)

    def for_model(self, model: ServedModel) -> EpisodicMethod:
        """See ``ModelSpecific.for_model``."""
        full = FullLayers(model.config)
        if not full.is_part:
            refuse_windows(NAME, model.config)
        if model.token_bytes is None or model.encode is None:
            raise InvalidRequestError(
                f"{NAME} finds turns by the text of tokens, which this engine was not given",
                param="method",
            )
        similarity = np.zeros(full.config.layers)
        if self.alpha:
            similarity = load_tables(NAME, VERSION, model)["similarity"]
            require(
                similarity.shape == (full.config.layers,),
                f"{NAME}: the tables are of a model with other layers",
            )
        single = self.scorer != "episode"
        rule = EpisodeRule(
            budget=self.budget, block=self.block, episodes=1 if single else self.episodes,
            turns=self.turns, near=self.near, sinks=self.sinks, system=self.system == 1,
            pooled=self.heads == "pooled", grows=self.grow == 1, memory=self.memory,
        )  # fmt: skip
        config = model.config
        reader = TurnReader.of(model.token_bytes, config.vocab, config.eos_token_ids)
        instruction = np.array(model.encode(INSTRUCTION), np.int32)
        scorer = next(each for each in _SCORERS if each == self.scorer)
        encode = None
        if model.embed is not None and not single:  # of one episode there is nothing to choose
            encode = partial(text_vector, model.token_bytes, model.embed)
        return EpisodicMethod(
            rule, reader, instruction, similarity, self.alpha, scorer, encode=encode
        )


def text_vector(
    token_bytes: Callable[[int], bytes], embed: Callable[[str], Float32Array], tokens: Int32Array
) -> Float64Array:
    """Return the vector of the text of [n] int32 tokens."""
    text = b"".join(map(token_bytes, tokens.tolist())).decode("utf-8", errors="replace")
    return embed(text).astype(np.float64)
