"""ReuseSession: a loaded model that counts what each request computes until its first token."""

import itertools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from midfill.arrays import Float32Array, RunnerArray
from midfill.config import ModelOptions
from midfill.engine.loading import load_engine
from midfill.errors import GenerationError
from midfill.frontend.generation import PromptGeneration
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.formats import FimFormat
from midfill.infill.window import WindowRule
from midfill.methods.method import Method
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.runners.forward.runner import Runner
from midfill_lab.bench.methods.session import NO_METHODS


class Measured(NamedTuple):
    """One request: its cost until the first token's logits, these, and the answer's first line."""

    ttft_seconds: float
    row_layers: int
    key_pairs: int
    cached_tokens: int
    reused_tokens: int
    log_probabilities: Float32Array
    answer: str


class ReuseSession:
    """A model in this process, for one request at a time.

    Attributes:
        tokenizer: the model's.
        info: backend and context.

    Args:
        model: its name or path, with the adapter that midfill ships for it.
        threads: of the CPU; None takes all cores.
        extra: further methods that requests may name.

    Raises:
        MidfillError: it can't be found or loaded.
    """

    def __init__(
        self,
        model: str,
        threads: int | None = None,
        extra: Mapping[str, Method] = NO_METHODS,
    ) -> None:
        folder = resolve_adapter(model, None)
        self._checkpoint = open_model(resolve(model), folder, "auto")
        options = ModelOptions(
            threads=threads,
            adapter=None if folder is None else str(folder),
            speculation=False,
            allow_methods=("any",),
        )
        self._extra = dict(extra)
        self._counter: _WorkCounter
        self._engine, self._runner, self.info = load_engine(
            self._checkpoint, options, wrap=self._count, extra_methods=self._extra
        )
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
        return fim_format(self._checkpoint, None)

    def add_methods(self, methods: Mapping[str, Method]) -> None:
        """Let requests name further methods."""
        self._extra |= methods

    def find_method(self, name: str) -> Method | None:
        """Return the method that requests name so."""
        return self._engine.find_method(name)

    def ask(self, prompt: Prompt, method: str, tenant: str, max_tokens: int) -> Measured:
        """Answer a prompt greedily, to the end of its line.

        Raises:
            GenerationError: the engine failed.
        """
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=("\n",))
        response, text = PromptGeneration(prompt, sampling, self.tokenizer), ""
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
                    if delta.finish_reason is not None and output.finish_reason is None:
                        self._engine.cancel(name)
        counter, usage = self._counter, response.usage
        assert counter.log_probabilities is not None
        return Measured(
            counter.seconds, counter.row_layers, counter.key_pairs, usage.cached_tokens,
            usage.reused_tokens, counter.log_probabilities, text,
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
        self.row_layers = self.key_pairs = 0
        self.seconds = 0.0
        self.log_probabilities: Float32Array | None = None
        self._started = time.perf_counter()

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """See ``Runner.forward``."""
        self._add(batch, self._runner.config.layers)
        logits = self._runner.forward(batch)
        if self.log_probabilities is None and len(logits):
            self.seconds = time.perf_counter() - self._started
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
            self.key_pairs += int(batch.slots_seen().sum(dtype=np.int64)) * layers
