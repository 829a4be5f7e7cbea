"""``bench blocks``: what caches of whole blocks cost, and whether aligning cuts to blocks helps.

vLLM and others cache a prompt in blocks of 16 tokens, some models' caches in blocks of 64 or 528. A
prompt then finds only whole blocks of what it shares with an earlier one. The planner could move
each cut back to a line where the part before the increment ends with a block. ``aligned`` does so,
within a distance, for as long as the cut stays.
"""

import bisect
from collections.abc import Sequence

import msgspec

from midfill.infill.common_affixes import common_prefix
from midfill.infill.layout import Segment, TextSegment, lay_out
from midfill.infill.window import WindowRule
from midfill.lab.bench.edits import layouts
from midfill.lab.bench.edits.cost import PieceTokenizer, PromptEncoder, Tokenize
from midfill.lab.bench.edits.editor import Round
from midfill.system.reporting.result_table import ResultTable

BLOCKS = (1, 16, 64, 528)
_FAR = 1500  # characters that an aligned cut may be further back
_SENTINELS = 3


class BlockCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens computed per request with a cache of one block size.

    Attributes:
        block: its tokens.
        psm, planner, aligned: by layout.
    """

    block: int
    psm: float
    planner: float
    aligned: float


def measure_blocks(rounds: Sequence[Round], window: WindowRule) -> list[BlockCosts]:
    """Count a session for each block size.

    Args:
        rounds: the session.
        window: how much of each document the planner shows.
    """
    tokenize = PieceTokenizer()
    encode = PromptEncoder(tokenize)
    planned = layouts.plan(rounds, tokenize, window).prompts
    psm = [_cut(segments, len(_prefix(segments))) for segments in planned]
    return [
        BlockCosts(
            block=block,
            psm=_mean_computed(rounds, psm, encode, block),
            planner=_mean_computed(rounds, planned, encode, block),
            aligned=_mean_computed(rounds, _align(planned, tokenize, block), encode, block),
        )
        for block in BLOCKS
    ]


def blocks_table(costs: Sequence[BlockCosts], requests: int, window: WindowRule) -> ResultTable:
    """Return the figures as a table."""
    return ResultTable(
        rows=[
            {
                "tokens of a block": str(each.block),
                "PSM": f"{each.psm:.0f}",
                "planner": f"{each.planner:.0f}",
                "planner, aligned": f"{each.aligned:.0f}",
            }
            for each in costs
        ],
        labels=0,
        title="Tokens computed per request",
        caption=f"Tokens computed per request, of {requests} requests of the editing mix in windows"
        f" of {window.before} and {window.after} characters.",
    )


def _align(prompts: layouts.Prompts, tokenize: Tokenize, block: int) -> list[Sequence[Segment]]:
    """Move cuts back to lines where the text before the increment ends with a block, or nearly."""
    chosen: dict[tuple[str, str], int] = {}
    aligned: list[Sequence[Segment]] = []
    for segments in prompts:
        head, suffix = _text(segments, "prefix"), _text(segments, "suffix")
        if block == 1 or not head or not _text(segments, "increment"):
            aligned.append(segments)
            continue
        if (head, suffix) not in chosen:
            chosen[head, suffix] = _best_cut(head, suffix, tokenize, block)
        aligned.append(_cut(segments, chosen[head, suffix]))
    return aligned


def _best_cut(head: str, suffix: str, tokenize: Tokenize, block: int) -> int:
    others = _SENTINELS + len(tokenize(suffix))
    first = max(0, len(head) - _FAR)
    lines = [at + 1 for at in range(first, len(head) - 1) if head[at] == "\n"]

    def cost(cut: int) -> tuple[int, int]:
        return (others + len(tokenize(head[:cut]))) % block, -cut

    return min([len(head), *lines], key=cost)


def _mean_computed(
    rounds: Sequence[Round], prompts: layouts.Prompts, encode: PromptEncoder, block: int
) -> float:
    """Return the tokens that a request computes, with one cache of whole blocks for all."""
    known: list[str] = []
    computed = 0
    for one, segments in zip(rounds, prompts, strict=True):
        prompt = encode(segments)
        place = bisect.bisect_left(known, prompt)
        near = known[max(0, place - 1) : place + 1]
        shared = max((common_prefix(other, prompt) for other in near), default=0)
        computed += len(prompt) - min(shared // block * block, len(prompt) - 1)
        bisect.insort(known, encode(layouts.with_answer(segments, one.shown)))
    return computed / len(rounds)


def _cut(segments: Sequence[Segment], cut: int) -> Sequence[Segment]:
    """Return a prompt's texts, cut elsewhere."""
    return lay_out(layouts.FORMAT, _prefix(segments), _text(segments, "suffix"), cut)[0]


def _prefix(segments: Sequence[Segment]) -> str:
    return _text(segments, "prefix") + _text(segments, "increment")


def _text(segments: Sequence[Segment], role: str) -> str:
    return "".join(
        each.text for each in segments if isinstance(each, TextSegment) and each.role == role
    )
