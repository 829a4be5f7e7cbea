"""CountingEngine: an engine without a model: its prefix cache, and answers that are given.

The counts are those of the real engine with a pool that never has to evict. A prompt's tokens are
found in the cache as far as they agree with any earlier prompt of the tenant and what was written
after it, but at least the last one is computed. Of an answer, every token but the last has been
computed when it ends.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest
from midfill.kv.radix_cache import RadixCache
from midfill.models.tokens.tokenizer import Tokenizer


class Counts(msgspec.Struct):
    """What was computed.

    Attributes:
        requests: prompts with an answer.
        prompt_tokens: tokens of these.
        computed_tokens: how many of them were computed while a client waited.
        background_tokens: tokens of prompts that were computed in idle time.
    """

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    background_tokens: int = 0


class CountingEngine(EngineClient):
    """Answers every request at once.

    Args:
        tokenizer: of the model whose prompts are counted.

    Attributes:
        answer: what is written from now on.
        counts: what was computed so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(Path(), ModelOptions())
        self.state = "ready"
        self.answer = ""
        self.counts = Counts()
        self._tokenizer = tokenizer
        self._cache = RadixCache()
        self._end = next(iter(tokenizer.eos_token_ids))

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Answer requests; the stream yields their outputs."""
        stream = OutputStream(self, requests)
        for request in requests:
            for output in self._run(request):
                stream.put(output)
        return stream

    def _run(self, request: EngineRequest) -> Iterator[EngineOutput]:
        tokens = request.token_ids
        cached = self._compute(request.tenant, tokens, len(tokens) - (not request.background))
        if request.background:
            self.counts.background_tokens += len(tokens) - cached
            yield EngineOutput(
                request_id=request.request_id, index=0, token_ids=[], finish_reason="stop"
            )
            return
        self.counts.requests += 1
        self.counts.prompt_tokens += len(tokens)
        self.counts.computed_tokens += len(tokens) - cached
        written = self._written(request)
        self._compute(request.tenant, [*tokens, *written[:-1]], 0)
        ended = written[-1] == self._end
        for index in range(request.sampling.n):
            yield EngineOutput(
                request_id=request.request_id,
                index=index,
                token_ids=written,
                finish_reason="stop" if ended else "length",
                cached_tokens=cached,
            )

    def _compute(self, tenant: str, tokens: list[int], most: int) -> int:
        """Put tokens into the cache; return how many of the first ``most`` were there."""
        array = np.array(tokens, dtype=np.int32)
        found = self._cache.peek(tenant, array[:most]).tokens
        self._cache.insert(tenant, array, np.zeros_like(array))
        return found

    def _written(self, request: EngineRequest) -> list[int]:
        """Return the answer's tokens, those of healed bytes first."""
        healed = request.begins_with.decode(errors="replace")
        tokens = [*self._tokenizer.encode(healed + self.answer), self._end]
        return tokens[: request.sampling.max_tokens]
