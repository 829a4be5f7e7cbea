"""UpstreamPrompts: a prompt of the gateway in the form that an upstream takes."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.gateway.calls import UpstreamFailedError, UpstreamPrompt
from midfill.serving.gateway.character_tokenizer import CharacterTokenizer, PromptText
from midfill.serving.gateway.discovery import token_ids
from midfill.serving.gateway.spelled_tokens import SpelledTokens
from midfill.serving.gateway.upstream import Upstream

_MAX_REMEMBERED = 4_000_000  # characters of texts whose ids are remembered


class UpstreamPrompts:
    """Turns the ids of a prompt into what is sent.

    With the model's own tokenizer that is these ids. Otherwise it is text, in which the upstream
    finds the sentinels; where user text spells a special token, it is the ids that the upstream
    itself gives to parts that spell none. Where it can't do that either, the text is escaped.

    Args:
        tokenizer: the one that made the ids.
        spelled: finds special tokens in user text.
        tokenizes: whether the upstreams can be asked for ids.
    """

    def __init__(self, tokenizer: Tokenizer, spelled: SpelledTokens, tokenizes: bool) -> None:
        self._tokenizer = tokenizer
        self._spelled = spelled
        self._tokenizes = tokenizes
        self._ids: OrderedDict[tuple[str, str, bool], list[int]] = OrderedDict()
        self._held = 0

    async def of(self, ids: Sequence[int], upstream: Upstream) -> UpstreamPrompt:
        """Return a prompt as an upstream takes it.

        Raises:
            UpstreamFailedError: the upstream had to tokenise it, and can't.
        """
        if not isinstance(self._tokenizer, CharacterTokenizer):
            return list(ids)
        parts = self._tokenizer.parts(ids)
        split = [[each.text] if each.special else self._spelled.split(each.text) for each in parts]
        if all(len(texts) == 1 for texts in split):
            return "".join(each.text for each in parts)
        if not self._tokenizes:
            return "".join(
                each.text if each.special else self._spelled.escape(each.text) for each in parts
            )
        texts = [
            PromptText(text, part.special)
            for part, texts in zip(parts, split, strict=True)
            for text in texts
        ]
        found = await asyncio.gather(
            self._bos(upstream), *(self._ids_of(each, upstream) for each in texts)
        )
        return [token_id for ids in found for token_id in ids]

    async def _bos(self, upstream: Upstream) -> list[int]:
        """Return what the upstream begins every sequence with."""
        key = (upstream.address, "", True)
        if key not in self._ids:
            with_bos = await token_ids(upstream, "a", special=False, bos=True)
            plain = await token_ids(upstream, "a", special=False)
            begins = with_bos[-len(plain) :] == plain  # SentencePiece may join a blank to it
            self._ids[key] = with_bos[: -len(plain)] if begins else with_bos[:1]
        return self._ids[key]

    async def _ids_of(self, part: PromptText, upstream: Upstream) -> list[int]:
        key = (upstream.address, part.text, part.special)
        found = self._ids.get(key)
        if found is not None:
            self._ids.move_to_end(key)
            return found
        ids = await token_ids(upstream, part.text, special=part.special)
        if part.special is False and not ids:
            raise UpstreamFailedError("can't tokenise")
        if key not in self._ids:
            self._ids[key] = ids
            self._held += len(part.text)
            while self._held > _MAX_REMEMBERED:
                (_, text, _), _ = self._ids.popitem(last=False)
                self._held -= len(text)
        return ids
