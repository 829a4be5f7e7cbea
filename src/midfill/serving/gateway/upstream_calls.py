"""UpstreamCalls: from the engine's requests to what upstreams are asked."""

import hashlib
from collections.abc import Sequence

import msgspec

from midfill.engine.request import EngineRequest
from midfill.engine.routing import request_key
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.gateway.calls import Call
from midfill.serving.gateway.character_tokenizer import CHARACTERS_PER_TOKEN, CharacterTokenizer
from midfill.serving.gateway.prompt_text import UpstreamPrompts
from midfill.serving.gateway.upstream import Upstream


class UpstreamCalls:
    """Makes calls of requests.

    Args:
        tokenizer: the one that makes prompts.
        prompts: turns their ids into what upstreams take.
        salts: secret from which each tenant's cache salt is made; b"" makes none.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: UpstreamPrompts, salts: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._salts = salts

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
        salt = ""
        if self._salts:
            tenant = request.tenant.encode()
            salt = hashlib.blake2b(tenant, key=self._salts, digest_size=16).hexdigest()
        return Call(
            model=upstream.model,
            prompt=await self._prompts.of(ids, upstream),
            sampling=sampling,
            answers=len(indices),
            stop=tuple(stop),
            cache_salt=salt,
            begins_with=begins_with,
        )

    def unhealed(self, request: EngineRequest) -> list[int]:
        """Return a prompt with the half word that was taken off its end."""
        return [*request.token_ids, *self._tokenizer.spell(request.begins_with)]

    def estimate_tokens(self, ids: Sequence[int]) -> int:
        """Return about how many tokens a prompt has."""
        if isinstance(self._tokenizer, CharacterTokenizer):
            return max(1, round(len(ids) / CHARACTERS_PER_TOKEN))
        return len(ids)


def document_of(request: EngineRequest) -> str:
    """Return what a request's upstream is chosen by."""
    return request_key(request.tenant, request.document, request.token_ids)


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
