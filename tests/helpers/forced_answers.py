"""Distributions that a model has for the tokens of a given answer, under a method."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from midfill.engine.request import EngineSamplingParams
from midfill.methods.method import Method
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from serving import build_engine, request, serve


class ForcingRunner:
    """A runner whose greedy tokens are those of an answer, whatever is most likely.

    Attributes:
        answer: the tokens.
        seen: log probabilities [vocab] at each of them so far.
    """

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self.answer: Sequence[int] = ()
        self.seen: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        return self._noted(self._runner.forward(batch))

    def compute_logits(self, batch: ForwardBatch, hidden: np.ndarray) -> np.ndarray:
        return self._noted(self._runner.compute_logits(batch, hidden))

    def argmax_tokens(self, logits: np.ndarray) -> list[int]:
        return [self.answer[len(self.seen) - 1]] * len(logits)

    def _noted(self, logits: np.ndarray) -> np.ndarray:
        self.seen += [log_softmax(row) for row in logits]
        return logits


class ForcedAnswers:
    """Asks one engine, in which every exact prompt stays cached, for given answers.

    The runner serves nothing else: its cells are this engine's.

    Attributes:
        computed: rows that the last answer took, its prompt's and its own.
        engine: the engine.
    """

    def __init__(self, runner: CpuRunner, methods: Mapping[str, Method | None]) -> None:
        self._forcing = ForcingRunner(runner)
        self.computed = 0
        self._exact: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}
        # A prompt is one step, and no answer is drafted.
        self.engine = build_engine(self._forcing, token_budget=8192, methods=methods)  # type: ignore[arg-type]

    def logprobs(
        self,
        method: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        tenant: str = "",
        contexts: tuple[int, ...] = (),
        compress_after: int = 0,
    ) -> np.ndarray:
        """Return the log probabilities [answer's tokens, vocab]; tenants share no cache.

        ``contexts`` are the bounds of the prompt's files; for these and ``compress_after`` see
        ``EngineRequest``.
        """
        self._forcing.answer, self._forcing.seen = answer, []
        params = EngineSamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
        options = {"contexts": contexts, "compress_after": compress_after}
        asked = request("r", prompt, params, tenant, method=method, **options)
        self.computed = -self.engine.stats().computed_tokens
        found = serve(self.engine, [asked])["r", 0]
        self.computed += self.engine.stats().computed_tokens
        assert found.tokens == list(answer)
        return np.array(self._forcing.seen)

    def divergence(self, method: str, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return the mean divergence of a method's answer from that of full KV, named "".

        An answer's first token is left out: it sees the whole prompt under every method.
        """
        asked = tuple(prompt), tuple(answer)
        if asked not in self._exact:
            self._exact[asked] = self.logprobs("", prompt, answer)
        exact, other = self._exact[asked], self.logprobs(method, prompt, answer)
        return float((np.exp(exact) * (exact - other)).sum(axis=1)[1:].mean())
