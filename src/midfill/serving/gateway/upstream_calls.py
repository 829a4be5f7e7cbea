"""UpstreamCalls: from the engine's requests to what upstreams are asked, in the form they take."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from midfill.engine.request import EngineRequest, RequestHints
from midfill.engine.routing import document_key, request_key
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.gateway.character_tokenizer import (
    CHARACTERS_PER_TOKEN,
    CharacterTokenizer,
    PromptText,
    SpelledTokens,
)
from midfill.serving.gateway.discovery import token_ids
from midfill.serving.gateway.upstream import Upstream
from midfill.serving.gateway.upstream_api import Call, UpstreamFailedError, UpstreamPrompt

_MAX_REMEMBERED = 4_000_000  # characters of texts whose ids are remembered


class UpstreamCalls:
    """Makes calls of requests.

    Args:
        tokenizer: the one that makes prompts.
        spelled: finds special tokens in user text.
        tokenizes: whether the upstreams can be asked for ids.
        salts: secret from which each tenant's cache salt is made; b"" makes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spelled: SpelledTokens,
        tokenizes: bool,
        salts: bytes = b"",
    ) -> None:
        self._tokenizer = tokenizer
        self._spelled = spelled
        self._tokenizes = tokenizes
        self._salts = salts
        self._ids: OrderedDict[tuple[str, str, bool], list[int]] = OrderedDict()
        self._held = 0

    async def of(
        self,
        request: EngineRequest,
        ids: Sequence[int],
        indices: Sequence[int],
        upstream: Upstream,
        begins_with: str = "",
    ) -> Call:
        """Return what to ask an upstream.

        Args:
            request: what it is for.
            ids: the prompt.
            indices: which of its answers.
            upstream: the server.
            begins_with: what it has to make the answers begin with.
        """
        sampling, stop = request.sampling, list[str]()
        if isinstance(self._tokenizer, CharacterTokenizer):
            known, stop = self._tokenizer.model_ids(sampling.stop_token_ids)
            sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(known))
        spare = _spare_tokens(request, ids, upstream)
        sampling = msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - len(request.begins_with) + spare
        )
        if sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + indices[0])
        return Call(
            model=upstream.model,
            prompt=await self._prompt(ids, upstream),
            sampling=sampling,
            answers=len(indices),
            stop=tuple(stop),
            cache_salt=self.cache_salt(request.tenant),
            begins_with=begins_with,
            prediction=self._prediction(request, ids),
            hints=self._hints(request),
        )

    def _prediction(self, request: EngineRequest, ids: Sequence[int]) -> str:
        """Return what the answer to a prompt will probably be, as text.

        Args:
            request: the request.
            ids: the prompt; where it is longer than the request's, it has the half word in it.
        """
        written = b"".join(map(self._tokenizer.token_bytes, request.prediction))
        if len(ids) > len(request.token_ids):
            written = written.removeprefix(request.begins_with)
        return written.decode(errors="ignore")

    @property
    def has_tenants(self) -> bool:
        """Whether tenants are to be kept apart."""
        return bool(self._salts)

    def cache_salt(self, tenant: str, own: str = "") -> str:
        """Return what keeps a tenant's cached KV apart from others'; "" where nobody else is.

        Args:
            tenant: whose.
            own: the salt by which the tenant keeps its own requests apart.
        """
        if not self._salts:
            return own
        salted = f"{tenant}\0{own}" if own else tenant
        return hashlib.blake2b(salted.encode(), key=self._salts, digest_size=16).hexdigest()

    def program(self, tenant: str, name: str) -> str:
        """Return the name by which upstreams know a tenant's program; no other tenant's has it."""
        if not self._salts:
            return name
        key = document_key(tenant, name).encode()
        return hashlib.blake2b(key, key=self._salts, digest_size=16).hexdigest()

    def _hints(self, request: EngineRequest) -> RequestHints:
        """Return what an upstream is told of a request for its scheduler.

        It takes all tenants for one, so their priorities are not passed on.
        """
        hints = request.hints
        if not self._salts:
            return hints
        program = hints.program and self.program(request.tenant, hints.program)
        return msgspec.structs.replace(hints, priority=0, program=program)

    def unhealed(self, request: EngineRequest) -> list[int]:
        """Return a prompt with the half word that was taken off its end."""
        return [*request.token_ids, *self._tokenizer.spell(request.begins_with)]

    def estimate_tokens(self, ids: Sequence[int]) -> int:
        """Return about how many tokens a prompt has."""
        if isinstance(self._tokenizer, CharacterTokenizer):
            return max(1, round(len(ids) / CHARACTERS_PER_TOKEN))
        return len(ids)

    async def _prompt(self, ids: Sequence[int], upstream: Upstream) -> UpstreamPrompt:
        """Return a prompt as an upstream takes it.

        With the model's own tokenizer that is its ids. Otherwise it is text, in which the upstream
        finds the sentinels; where user text spells a special token, it is the ids that the upstream
        itself gives to parts that spell none. Where it can't do that either, the text is escaped.

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


def document_of(request: EngineRequest) -> str:
    """Return what a request's upstream is chosen by."""
    return request_key(request.tenant, request.document, request.token_ids, request.hints.program)


def _spare_tokens(request: EngineRequest, ids: Sequence[int], upstream: Upstream) -> int:
    """Return how many tokens an answer may have for the half word, beside its own.

    A server that names tokens may write one per byte, and the answer is cut where it has enough.
    Otherwise that can't be seen, and a half word has one or two.
    """
    if len(ids) > len(request.token_ids):
        return 0
    if upstream.kind in ("vllm", "llama.cpp", "midfill"):
        return len(request.begins_with)
    return min(len(request.begins_with), 2)
