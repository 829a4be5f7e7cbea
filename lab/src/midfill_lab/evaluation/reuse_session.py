"""ReuseSession: a loaded model that counts what each request computes until its first token."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from midfill.arrays import Float32Array, RunnerArray
from midfill.config import ModelOptions
from midfill.engine.loading import load_engine
from midfill.errors import GenerationError
from midfill.frontend.generation import PromptGeneration
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format, fingerprint_of
from midfill.frontend.sampling import SamplingParams
from midfill.infill.formats import FimFormat
from midfill.infill.window import WindowRule
from midfill.methods.method import Method
from midfill.methods.registry import OFF
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.runners.forward.runner import Runner
from midfill.system.progress import Progress, ignore_progress
from midfill_lab.evaluation.models import ModelChoice

NO_METHODS: Mapping[str, Method] = {}


class Measured(NamedTuple):
    """One request: its cost until the first token's logits, these, and the answer's first line.

    Attributes:
        ttft_seconds: until these logits were there.
        row_layers, key_pairs: computed until then.
        cached_tokens, reused_tokens: see ``Usage``.
        log_probabilities: of the first token.
        answer: up to its line's end.
        ttft_processor_seconds, steps_processor_seconds: until the first logits, and after them, as
            the process has used the processor.
        steps: that the model ran after the first logits.
        confidence: the model's estimate that the line is right; None if it has no rule for that.
    """

    ttft_seconds: float
    row_layers: int
    key_pairs: int
    cached_tokens: int
    reused_tokens: int
    log_probabilities: Float32Array
    answer: str
    ttft_processor_seconds: float
    steps_processor_seconds: float
    steps: int
    confidence: float | None = None


class ReuseSession:
    """A model in this process, for one request at a time.

    Attributes:
        tokenizer: the model's.
        info: backend and context.
        fingerprint: digest of what decides the model's answers.

    Args:
        choice: the model, and how to run it; of its processes there is one.
        extra: further methods that requests may name.
        progress: called with (stage, done, total) while it loads.

    Raises:
        MidfillError: it can't be found or loaded.
    """

    def __init__(
        self,
        choice: ModelChoice,
        extra: Mapping[str, Method] = NO_METHODS,
        progress: Progress = ignore_progress,
    ) -> None:
        folder = resolve_adapter(choice.model, choice.adapter)
        path = resolve(choice.model, progress)
        self._checkpoint = open_model(path, folder, choice.weights)
        self._fim_tokens = choice.fim_tokens
        options = ModelOptions(
            backend=choice.backend,
            device=choice.device,
            weights=choice.weights,
            kv_cache_dtype=choice.kv_cache_dtype,
            threads=choice.threads,
            adapter=None if folder is None else str(folder),
            speculation=False,
            allow_methods=("any",),
        )
        self._counter: _WorkCounter
        self._engine, self._runner, self.info = load_engine(
            self._checkpoint, options, progress, wrap=self._count, extra_methods=extra
        )
        self.fingerprint = fingerprint_of(self._checkpoint)
        self.tokenizer = self._checkpoint.tokenizer
        self._numbers = itertools.count()

    def close(self) -> None:
        """End the model's threads."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def encoder(self, window: WindowRule | None) -> PromptEncoder:
        """Return an encoder that has seen no document yet."""
        return PromptEncoder(self._checkpoint, self.format, self.info.context, window)

    @property
    def format(self) -> FimFormat | None:
        """The model's FIM tokens; None if it has none."""
        return fim_format(self._checkpoint, self._fim_tokens)

    @property
    def backend(self) -> str:
        """What runs the model, without the number of threads, on which no answer depends."""
        return self.info.backend.partition(",")[0]

    def tenant_who_asked(self, prompts: Sequence[Prompt], method: str = OFF) -> str:
        """Return a new tenant who has asked some prompts, and nothing else."""
        tenant = f"tenant {next(self._numbers)}"
        for prompt in prompts:
            self.ask(prompt, method, tenant, 1)
        return tenant

    def find_method(self, name: str) -> Method | None:
        """Return the method that requests name so."""
        return self._engine.find_method(name)

    def ask(self, prompt: Prompt, method: str, tenant: str, max_tokens: int) -> Measured:
        """Answer a prompt greedily, to the end of its line.

        Raises:
            GenerationError: the engine failed.
        """
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, stop=("\n",), min_confidence=0.0
        )
        response, text = PromptGeneration(prompt, sampling, self.tokenizer), ""
        confidence = None
        name = f"{next(self._numbers)}"
        self._counter.start()
        self._engine.add(prompt.with_method(method).request(name, sampling, tenant))
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error is not None:
                    raise GenerationError(output.error)
                delta = None if response.finished else response.push(output)
                if delta is not None:
                    text += delta.text
                    confidence = delta.confidence or confidence
                    if delta.finish_reason is not None and output.finish_reason is None:
                        self._engine.cancel(name)
        counter, usage = self._counter, response.usage
        assert counter.log_probabilities is not None
        return Measured(
            counter.seconds, counter.row_layers, counter.key_pairs, usage.cached_tokens,
            usage.reused_tokens, counter.log_probabilities, text, counter.processor_seconds,
            time.process_time() - counter.first_at, counter.steps,
            None if confidence is None else confidence.estimate,
        )  # fmt: skip

    def _count(self, runner: Runner) -> Runner:
        self._counter = _WorkCounter(runner)
        return cast(Runner, self._counter)


class _WorkCounter:
    """A runner that counts what it computes until the first logits, and keeps these."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def start(self) -> None:
        """Begin to count."""
        self.row_layers = self.key_pairs = self.steps = 0
        self.seconds = self.processor_seconds = 0.0
        self.log_probabilities: Float32Array | None = None
        self._started = time.perf_counter()
        self.first_at = self._processor_started = time.process_time()

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """See ``Runner.forward``."""
        self._add(batch, self._runner.config.layers)
        self.steps += self.log_probabilities is not None
        logits = self._runner.forward(batch)
        if self.log_probabilities is None and len(logits):
            self.seconds = time.perf_counter() - self._started
            self.first_at = time.process_time()
            self.processor_seconds = self.first_at - self._processor_started
            self.log_probabilities = log_softmax(self._runner.logits_ops.to_numpy(logits[0]))
        return logits

    def run_layers(
        self, batch: ForwardBatch, hidden: RunnerArray, first: int, end: int
    ) -> RunnerArray:
        """See ``Runner.run_layers``."""
        self._add(batch, end - first)
        return self._runner.run_layers(batch, hidden, first, end)

    def _add(self, batch: ForwardBatch, layers: int) -> None:
        if self.log_probabilities is None:
            self.row_layers += batch.rows * layers
            self.key_pairs += round(float(batch.keys_seen().sum()) * layers)
