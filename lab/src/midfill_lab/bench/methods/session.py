"""MethodSession: a loaded model, each of whose requests names a method; its logits are recorded."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from midfill.arrays import Float32Array, RunnerArray
from midfill.config import ModelOptions
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams
from midfill.errors import GenerationError, InvalidRequestError
from midfill.frontend.generation import PromptGeneration
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.request import InfillRequest
from midfill.methods.method import Method
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_model
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.runners.forward.runner import Runner

NO_METHODS: Mapping[str, Method] = {}


class Holding(NamedTuple):
    """What one request held while it ran, and how fast it was.

    Attributes:
        after_prefill: slots that are neither free nor evictable once the first token is there.
        peak: the largest number of them after any step.
        ttft_seconds: from the request to the first token.
        decode_seconds: per token after the first.
        cached_tokens: prompt tokens that were found in the prefix cache.
        list_bytes: of the lists of cells that stand for the prompt, with their terms, and of KV
            that its method keeps outside the pool.
    """

    after_prefill: int
    peak: int
    ttft_seconds: float
    decode_seconds: float
    cached_tokens: int
    list_bytes: int


class MethodSession:
    """A model in this process, for one request at a time.

    All requests share one KV pool and its exact prefix cache, so a prompt is computed once and
    then compressed by every method in turn, as the engine always does it.

    Attributes:
        tokenizer: the model's.
        info: backend, memory, context.
        has_sentinels: whether the model has FIM tokens.
        fingerprint: digest of the model.
        served_model: what methods may know of it.
    """

    def __init__(
        self, model: str, threads: int | None = None, extra: Mapping[str, Method] = NO_METHODS
    ) -> None:
        """Load a model, with the adapter that midfill ships for it.

        Args:
            model: name or path.
            threads: that it runs on; None is one per core.
            extra: further methods that requests may name; more can be added to it later.

        Raises:
            MidfillError: it can't be found or loaded.
        """
        folder = resolve_adapter(model, None)
        checkpoint = open_model(resolve(model), folder, "auto")
        options = ModelOptions(
            threads=threads,
            adapter=None if folder is None else str(folder),
            speculation=False,
            allow_methods=("any",),
        )
        self._tap: _LogitsTap | None = None
        self._engine, self._runner, self.info = load_engine(
            checkpoint, options, wrap=self._listen, extra_methods=extra
        )
        self.tokenizer = checkpoint.tokenizer
        self.fingerprint = checkpoint.content_digest
        self.served_model = ServedModel(
            config=checkpoint.config,
            digest=model_digest(checkpoint),
            token_bytes=checkpoint.tokenizer.token_bytes,
            encode=checkpoint.tokenizer.encode,
        )
        format = fim_format(checkpoint, None)
        self.has_sentinels = format is not None
        self._prompts = PromptEncoder(checkpoint, format, self.info.context, None)
        self._numbers = itertools.count()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.info.kv_bytes // self.info.slots

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.info.layers

    def close(self) -> None:
        """End the model's threads."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a prompt, as the server begins raw prompts."""
        begin, tokens = self._prompts.raw_bos, self.tokenizer.encode(text)
        return tokens if begin is None else [begin, *tokens]

    def refusal(self, method: str) -> str | None:
        """Return why a method can't be used with this model; None if it can."""
        request = self._request([0, 0], method, EngineSamplingParams(max_tokens=1))
        try:
            self._engine.add(request)
        except InvalidRequestError as error:
            return str(error)
        self._engine.cancel(request.request_id)
        self._run()
        return None

    def log_likelihoods(
        self, tokens: Sequence[int], method: str, compress_after: int, score_from: int
    ) -> Float32Array:
        """Return the distributions of some of a prompt's tokens, given what a method keeps.

        Args:
            tokens: the prompt.
            method: compresses its first ``compress_after`` tokens.
            compress_after: the others are computed over what it keeps.
            score_from: number of the first token.

        Returns:
            Log-probabilities, float32 [len(tokens) - score_from, vocab].
        """
        assert self._tap is not None
        self._tap.rows = []
        sampling = EngineSamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        request = self._request(
            tokens, method, sampling, compress_after=compress_after, score_from=score_from
        )
        self._engine.add(request)
        self._run()
        rows, self._tap.rows = np.concatenate(self._tap.rows), None
        return rows[: len(tokens) - score_from]  # the last row is the answer's

    def answer_likelihoods(
        self, prompt: Sequence[int], answer: Sequence[int], method: str
    ) -> Float32Array:
        """Return the distributions of a known answer's tokens, which are generated one by one.

        So the method sees the prompt alone.

        Args:
            prompt: its tokens.
            answer: the tokens.
            method: for the prompt.

        Returns:
            Log-probabilities, float32 [len(answer), vocab].
        """
        assert self._tap is not None
        self._tap.rows, self._tap.forced = [], answer
        sampling = EngineSamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        try:
            self._engine.add(self._request(prompt, method, sampling))
            self._run()
            return np.concatenate(self._tap.rows)
        finally:
            self._tap.rows = self._tap.forced = None

    def hold(self, tokens: Sequence[int], method: str, decoded: int, *, cold: bool) -> Holding:
        """Answer a prompt, and measure.

        Args:
            tokens: the prompt.
            method: compresses it.
            decoded: tokens of the answer, at least 2.
            cold: compute the whole prompt, whatever is cached.
        """
        sampling = EngineSamplingParams(max_tokens=decoded, temperature=0.0, ignore_eos=True)
        tenant = f"cold {next(self._numbers)}" if cold else ""
        request = self._request(tokens, method, sampling, tenant=tenant)
        held: list[int] = []
        arrivals: list[float] = []
        after_prefill = cached = 0
        assert self._tap is not None
        self._tap.list_bytes = 0
        self._engine.take_parked_bytes()
        started = time.perf_counter()
        self._engine.add(request)
        while self._engine.has_work():
            outputs = _checked(self._engine.step())
            arrived = time.perf_counter()
            held.append(self._held_slots())
            if outputs and not arrivals:
                after_prefill, cached = held[-1], outputs[0].cached_tokens or 0
            arrivals += [arrived] * sum(len(output.token_ids) for output in outputs)
        return Holding(
            after_prefill=after_prefill,
            peak=max(held),
            ttft_seconds=arrivals[0] - started,
            decode_seconds=(arrivals[-1] - arrivals[0]) / (len(arrivals) - 1),
            cached_tokens=cached,
            list_bytes=self._tap.list_bytes + self._engine.take_parked_bytes(),
        )

    def infill_prompt(self, prefix: str, suffix: str, name: str) -> Prompt:
        """Return the prompt that the model is shown for a hole; ``name`` is the document's own."""
        return self._prompts.infill(InfillRequest(prefix=prefix, suffix=suffix, tenant=name))

    def infill(self, prompt: Prompt, methods: Sequence[str], max_tokens: int) -> list[str]:
        """Return the first line of the answer under each method, all in one batch."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=("\n",))
        responses: dict[str, PromptGeneration] = {}
        texts = dict.fromkeys(methods, "")
        for method in methods:
            responses[method] = PromptGeneration(prompt, sampling, self.tokenizer)
            self._engine.add(prompt.with_method(method).request(method, sampling))
        while self._engine.has_work():
            for output in _checked(self._engine.step()):
                method = output.request_id
                delta = responses[method].push(output) if method in responses else None
                if delta is None:
                    continue
                texts[method] += delta.text
                if delta.finish_reason is not None:
                    del responses[method]
                    self._engine.cancel(method)  # which it doesn't know where a line ended it
        return list(texts.values())

    def _held_slots(self) -> int:
        stats = self._engine.stats()
        return stats.slots_total - stats.slots_free - stats.slots_cached

    def _request(
        self, tokens: Sequence[int], method: str, sampling: EngineSamplingParams, **fields: Any
    ) -> EngineRequest:
        name = f"{next(self._numbers)}"
        return EngineRequest(
            request_id=name, token_ids=list(tokens), sampling=sampling, method=method, **fields
        )

    def _run(self) -> None:
        while self._engine.has_work():
            _checked(self._engine.step())

    def _listen(self, runner: Runner) -> Runner:
        self._tap = _LogitsTap(runner)
        return cast(Runner, self._tap)


class _LogitsTap:
    """A runner that also keeps the log-probabilities of its steps while ``rows`` is a list.

    Attributes:
        list_bytes: memory of the lists of cells in the first batch that had any since it was 0.
        forced: tokens that are the most likely ones, whatever the logits say; None: those that are.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.rows: list[Float32Array] | None = None
        self.list_bytes = 0
        self.forced: Sequence[int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """See ``Runner.forward``."""
        if not self.list_bytes:
            indices = [
                index
                for _, plan in batch.plans()
                for index in (plan.cells, *(part.cells for part in plan.parts))
            ]
            self.list_bytes = sum(index.nbytes for index in indices if index is not None)
        return self._kept(self._runner.forward(batch))

    def compute_logits(self, batch: ForwardBatch, hidden: RunnerArray) -> RunnerArray:
        """See ``Runner.compute_logits``."""
        return self._kept(self._runner.compute_logits(batch, hidden))

    def argmax_tokens(self, logits: RunnerArray) -> list[int]:
        """See ``Runner.argmax_tokens``."""
        if self.forced is None or self.rows is None:
            return self._runner.argmax_tokens(logits)
        return [self.forced[sum(map(len, self.rows)) - 1]] * len(logits)

    def _kept(self, logits: RunnerArray) -> RunnerArray:
        if self.rows is not None and len(logits):
            self.rows.append(log_softmax(self._runner.logits_ops.to_numpy(logits)))
        return logits


def _checked(outputs: list[EngineOutput]) -> list[EngineOutput]:
    """Return outputs.

    Raises:
        GenerationError: the engine failed on a request.
    """
    for output in outputs:
        if output.finish_reason == "error":
            raise GenerationError(output.error or "the engine failed")
    return outputs
