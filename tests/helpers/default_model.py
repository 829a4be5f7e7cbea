"""The default model in tests: who writes KV gets a runner of their own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
from forced_answers import ForcedAnswers

from midfill.kv.ragged import cells_of_slots
from midfill.methods.method import Method
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_model
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill_lab.bench.methods.probes import Haystacks


class DefaultModel:
    """The default model with its adapter."""

    def __init__(self) -> None:
        adapter = resolve_adapter(DEFAULT_MODEL, None)
        self.checkpoint: Checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, adapter)
        self.haystacks = Haystacks(self.checkpoint.tokenizer.encode, seed=0)

    @cached_property
    def served(self) -> ServedModel:
        """What methods are told of it."""
        return ServedModel(
            self.checkpoint.config,
            digest=model_digest(self.checkpoint),
            token_bytes=self.checkpoint.tokenizer.token_bytes,
            encode=self.checkpoint.tokenizer.encode,
        )

    @contextmanager
    def runner(self, slots: int) -> Iterator[CpuRunner]:
        """Load a runner for one engine: two that shared its cells would overwrite each other's."""
        runner = CpuRunner.load(self.checkpoint, slots=slots, threads=1)
        try:
            yield runner
        finally:
            runner.close()

    @contextmanager
    def forced_answers(
        self, slots: int, methods: Mapping[str, Method | None]
    ) -> Iterator[ForcedAnswers]:
        """Ask for known answers, under methods by their names, which may be added later."""
        with self.runner(slots) as runner:
            yield ForcedAnswers(runner, methods)

    def keys_and_values(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return those of a text: float32 [layers, kv_heads, tokens, head_dim] each."""
        config, count = self.checkpoint.config, len(tokens)
        with self.runner(count) as runner:
            slots, ends = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
            text = np.array(tokens, np.int32)
            runner.forward(ForwardBatch(text, slots, slots, ends, ends, slots, slots[-1:]))
            cells = cells_of_slots(slots, config.layers * config.kv_heads, runner.slots)
            read = (np.array(part) for part in zip(*map(runner.cells.read, cells), strict=True))
        keys, values = (
            part.reshape(config.layers, config.kv_heads, count, config.head_dim) for part in read
        )
        return keys, values
