"""TokenReport: a prompt as its tokens, beside what the same text would cost in PSM order.

What PSM would cost is counted for a server with a token-granular prefix cache of its own, which has
been sent the same requests: it is shown the same window and the same context, as ``PRE prefix SUF
suffix MID``, tokenised by the same tokenizer. Cached is the longest prefix that such a prompt has
in common with any earlier one of the same tenant, all of which count as computed, also those whose
requests were given up. Answers need not be remembered: they follow MID, where no later prompt
reaches.
"""

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, Role, in_psm_order
from midfill.models.tokens.layout_encoder import LayoutEncoder
from midfill.models.tokens.tokenizer import Detokenizer, Tokenizer

SegmentRole = Role | Literal["bos", "sentinel"]

_MAX_PROMPTS = 256
_MAX_TOKENS = 2_000_000  # of all remembered prompts together, 4 bytes each


@dataclass(frozen=True, slots=True)
class ReportedSegment:
    """A segment of a prompt.

    Attributes:
        role: which part of the prompt it is; "bos" is the token that begins every sequence.
        token_ids: its tokens.
        texts: what each token stands for, or its name if it stands for no text. A character of
            several tokens is in the last one's text, so that all of them together are the
            segment's text.
    """

    role: SegmentRole
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PsmCost:
    """What a prompt would cost in PSM order.

    Attributes:
        prompt_tokens: its tokens.
        cached_tokens: how many of them earlier prompts begin with, too.
    """

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A prompt's tokens.

    Attributes:
        segments: in the order in which the model reads them.
        healed_tokens: how many tokens at the end are not in the prompt, since the model writes
            their text again.
        psm: what the prompt would cost in PSM order; None for raw prompts and for models without
            such an order.
    """

    segments: tuple[ReportedSegment, ...]
    healed_tokens: int
    psm: PsmCost | None


class TokenReporter:
    """Reports the tokens of one model's prompts, and remembers them in PSM order.

    Args:
        tokenizer: the model's tokenizer.
        layouts: tokenises layouts.
        format: the model's FIM format, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, layouts: LayoutEncoder, format: FimFormat | None
    ) -> None:
        self._tokenizer = tokenizer
        self._layouts = layouts
        self._format = format
        self._history = PrefixHistory()
        self._text_alone = functools.cache(self._decode_alone)

    def report(
        self, layout: PromptLayout, parts: Sequence[Sequence[int]], sent: int, tenant: str
    ) -> TokenReport:
        """Return the report of a prompt that is about to be computed.

        Args:
            layout: its layout.
            parts: the ids of BOS and of each segment, see ``LayoutEncoder.encode_parts``.
            sent: how many of these ids the prompt holds.
            tenant: whose earlier prompts count as cached.
        """
        segments = [self._segment("bos", parts[0])] if parts[0] else []
        for segment, ids in zip(layout.segments, parts[1:], strict=True):
            if isinstance(segment, Sentinel):
                token_ids = (segment.token_id,)
                segments.append(ReportedSegment("sentinel", token_ids, (segment.text,)))
            else:
                segments.append(self._segment(segment.role, ids))
        healed = sum(map(len, parts)) - sent
        return TokenReport(tuple(segments), healed, self._psm_cost(layout, tenant))

    def _segment(self, role: SegmentRole, token_ids: Sequence[int]) -> ReportedSegment:
        texts = [self._text_alone(token_id) for token_id in token_ids]
        if None in texts:
            decode = Detokenizer(self._tokenizer).push
            texts = [
                decode((token_id,)) if self._tokenizer.token_bytes(token_id) else text
                for token_id, text in zip(token_ids, texts, strict=True)
            ]
        return ReportedSegment(role, tuple(token_ids), tuple(text or "" for text in texts))

    def _decode_alone(self, token_id: int) -> str | None:
        """Return a token's text or name; None for a token that holds a part of a character."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode() if raw else self._tokenizer.token_text(token_id)
        except UnicodeDecodeError:
            return None

    def _psm_cost(self, layout: PromptLayout, tenant: str) -> PsmCost | None:
        psm = None if self._format is None else in_psm_order(self._format, layout)
        if psm is None:
            return None
        ids = self._layouts.encode(psm)
        return PsmCost(len(ids), self._history.match_and_record(ids, tenant))


class PrefixHistory:
    """What a prefix cache would hold that has been sent certain prompts.

    Args:
        max_prompts: maximum number of prompts; the oldest are dropped first.
        max_tokens: maximum number of their tokens together.
    """

    def __init__(self, max_prompts: int = _MAX_PROMPTS, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._prompts: deque[tuple[str, NDArray[np.int32]]] = deque()
        self._tokens = 0

    def match_and_record(self, token_ids: Sequence[int], tenant: str) -> int:
        """Record a prompt; return how many of its first tokens an earlier one begins with.

        Its last token never counts: a model must compute it to continue.
        """
        ids = np.array(token_ids, dtype=np.int32)
        earlier = (held for owner, held in self._prompts if owner == tenant)
        matched = max((_common_prefix(ids, held) for held in earlier), default=0)
        self._prompts.append((tenant, ids))
        self._tokens += len(ids)
        while len(self._prompts) > self._max_prompts or self._tokens > self._max_tokens:
            self._tokens -= len(self._prompts.popleft()[1])
        return min(matched, len(ids) - 1)


def _common_prefix(ids: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(ids), len(other))
    differs = ids[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
