"""SharedContextSession: a loaded model that answers questions about contexts its cache holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams
from midfill.errors import GenerationError
from midfill_lab.bench.methods.session import MethodSession


@dataclass(frozen=True)
class Asked:
    """A prompt to be answered greedily.

    Attributes:
        tokens: the prompt.
        method: its specification.
        limit: tokens of the answer.
        tenant: whose prefix cache it shares.
        compress_after: how many of the prompt's first tokens the method sees; 0: all.
        contexts: see ``EngineRequest.contexts``.
        ends: whether an answer is complete, given its text so far.
    """

    tokens: tuple[int, ...]
    method: str
    limit: int
    tenant: str
    compress_after: int = 0
    contexts: tuple[int, ...] = ()
    ends: Callable[[str], bool] = lambda _: False


@dataclass
class Generated:
    """An answer, and what it took.

    Attributes:
        tokens: of the answer, its end token left out.
        text: of these.
        cached_tokens: prompt tokens whose KV was found in the cache.
        reused_tokens: prompt tokens whose KV was copied from elsewhere.
        held_slots: slots that are neither free nor evictable once the first token is there; None
            where others were answered at the same time.
        ended: whether nothing follows.
    """

    tokens: list[int]
    text: str = ""
    cached_tokens: int = 0
    reused_tokens: int = 0
    held_slots: int | None = None
    ended: bool = False


class SharedContextSession(MethodSession):
    """A model whose requests share the prefix cache of one tenant at a time.

    Attributes:
        tenant: whose cache it is; requests of another tenant find nothing of it.
    """

    tenant = ""

    def generate(self, asked: Sequence[Asked]) -> list[Generated]:
        """Answer prompts, all in one batch; answers are the same as if each were alone.

        Raises:
            GenerationError: the engine failed.
        """
        running: dict[str, tuple[Asked, Generated]] = {}
        answers = [Generated([]) for _ in asked]
        for each, answer in zip(asked, answers, strict=True):
            self.tenant = each.tenant
            sampling = EngineSamplingParams(max_tokens=each.limit, temperature=0.0)
            request = self._request(
                each.tokens,
                each.method,
                sampling,
                compress_after=each.compress_after,
                contexts=each.contexts,
            )
            running[request.request_id] = each, answer
            self._engine.add(request)
        while self._engine.has_work():
            for output in self._engine.step():
                prompt, answer = running[output.request_id]
                if not answer.tokens and len(asked) == 1:
                    answer.held_slots = self._held_slots()
                self._take(output, prompt, answer)
        return answers

    def cache(
        self, tokens: Sequence[int], method: str, tenant: str, contexts: Sequence[int]
    ) -> None:
        """Have a prompt's KV cached, and what a method keeps beside that where it is computed."""
        self.generate([Asked(tuple(tokens), method, 1, tenant, contexts=tuple(contexts))])

    def _take(self, output: EngineOutput, asked: Asked, answer: Generated) -> None:
        """Append what a step has generated; have the engine end an answer that is complete."""
        if output.finish_reason == "error":
            raise GenerationError(output.error or "the engine failed")
        if answer.ended:
            return
        if not answer.tokens:
            answer.cached_tokens = output.cached_tokens or 0
        answer.reused_tokens = max(answer.reused_tokens, output.reused_tokens)
        at_end_token = output.finish_reason == "stop"
        answer.tokens += output.token_ids[: len(output.token_ids) - at_end_token]
        answer.text = self.tokenizer.decode(answer.tokens)
        answer.ended = output.finish_reason is not None
        if not answer.ended and asked.ends(answer.text):
            answer.ended = True
            self._engine.cancel(output.request_id)

    def _request(
        self, tokens: Sequence[int], method: str, sampling: EngineSamplingParams, **fields: Any
    ) -> EngineRequest:
        return super()._request(tokens, method, sampling, **{"tenant": self.tenant, **fields})
