"""Building engines in tests, running them to their end, and what must hold at that end."""

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from midfill.arrays import Float32Array
from midfill.engine.engine import Clock, Engine, EngineOptions
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams, TokenLogprobs
from midfill.engine.scheduling.drafting import AcceptanceRates
from midfill.engine.scheduling.policies.background_prefill import BackgroundPrefill
from midfill.engine.scheduling.policies.layered_prefill import LayeredPrefill
from midfill.engine.scheduling.policies.online_first import OnlineFirst
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.policies.smart_spec import SmartSpec
from midfill.engine.scheduling.scheduler import SchedulerPolicy
from midfill.engine.scheduling.step_cost import StepCost
from midfill.engine.step.speculation import Speculation
from midfill.kv.tiers.warm_tier import WarmTier
from midfill.methods.method import Method
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner

GREEDY = EngineSamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@dataclass
class Answer:
    """All outputs of one answer, put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str | None = None

    def add(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, "an output after the end"
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason = output.finish_reason
        self.cached_tokens = output.cached_tokens
        self.error = output.error


def same(found: Answer, expected: Answer) -> bool:
    """Whether tokens and log probabilities are equal, to the last bit."""
    return (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


@dataclass(frozen=True)
class FixedCost(StepCost):
    """A step cost that learns nothing: each further row costs ``row`` times the first."""

    row: float = 0.02

    def seconds(self, rows: int, context: float) -> float:
        return 1.0 + self.row * (rows - 1)

    def observe(self, rows: int, context: float, seconds: float) -> None:
        assert rows >= 1
        assert seconds > 0.0


Answers = dict[tuple[str, int], Answer]


def build_engine(
    runner: Runner,
    eos_token_ids: SequenceOf[int] = (),
    *,
    token_budget: int = 128,
    max_running: int = 128,
    context: int | None = None,
    background_chunk: int = 64,
    max_background: int = 64,
    step_cost: StepCost | None = None,
    token_bytes: Callable[[int], bytes] | None = None,
    method: Method | None = None,
    methods: Mapping[str, Method | None] | None = None,
    by_layers: bool = False,
    warm_tier: WarmTier | None = None,
    clock: Clock = time,
    batching: SchedulerPolicy | None = None,
) -> Engine:
    """Build an engine with the policies that are served, sized for the test.

    ``step_cost`` decides which drafts pay; None turns speculation off. Requests may name
    ``methods``. With ``by_layers``, prompts that exceed the budget are prefilled by layers.
    ``batching`` replaces Sarathi-Serve; its token budget is its own.
    """
    chunked = batching or SarathiServe(token_budget, max_running)
    policy = LayeredPrefill(chunked, runner.config.layers, every_prompt=by_layers)
    speculation = None
    if step_cost is not None:
        speculation = Speculation(SmartSpec(token_budget), AcceptanceRates(), step_cost)
    return Engine(
        runner,
        eos_token_ids,
        EngineOptions(max_running=max_running, context=context),
        policy=OnlineFirst(BackgroundPrefill(policy, background_chunk, max_background)),
        speculation=speculation,
        token_bytes=token_bytes,
        method=method,
        find_method=None if methods is None else methods.__getitem__,
        warm_tier=warm_tier,
        clock=clock,
    )


def request(
    request_id: str,
    prompt: Iterable[int],
    sampling: EngineSamplingParams = GREEDY,
    tenant: str = "",
    **fields: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, token_ids=list(prompt), sampling=sampling, tenant=tenant, **fields
    )


def background(request_id: str, prompt: Iterable[int], tenant: str = "") -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        token_ids=list(prompt),
        sampling=EngineSamplingParams(),
        tenant=tenant,
        background=True,
    )


def serve_waiting(
    engine: Engine, requests: SequenceOf[EngineRequest]
) -> tuple[dict[tuple[str, int], Answer], list[int]]:
    """Answer requests one after the other, of which the last has arrived before any is answered.

    Returns:
        The answers, and how many tokens the last request could copy, for each step that it waited.
    """
    estimates: list[int] = []

    def note(one: Engine) -> None:
        for waiting in one._queues.sequences_of(requests[-1].request_id):
            if waiting.kv is None:
                estimates.append(waiting.method.found_elsewhere(waiting, 0))

    busy = EngineRequest(request_id="busy", token_ids=[9, 9], sampling=EngineSamplingParams())
    return serve(engine, [busy, *requests], after_step=note), estimates


def preempting_every(steps: int) -> Callable[[Engine], None]:
    """Return what preempts all running sequences after every so many steps, see ``serve``."""
    numbers = count(1)

    def preempt(one: Engine) -> None:
        if next(numbers) % steps == 0:
            for sequence in reversed(list(one._queues.running)):
                one._execution.preempt(sequence)

    return preempt


def serve(
    engine: Engine,
    requests: Iterable[EngineRequest] = (),
    arrivals: Mapping[int, list[EngineRequest]] | None = None,
    cancellations: Mapping[int, str | tuple[str, int]] | None = None,
    after_step: Callable[[Engine], None] | None = None,
) -> Answers:
    """Step the engine until it has no work left; return answers by (request, index).

    ``arrivals`` and ``cancellations`` happen before the step they name.
    """
    pending = dict(arrivals or {})
    cancelled = cancellations or {}
    answers: Answers = {}
    for one in requests:
        engine.add(one)
    step = 0
    while pending or engine.has_work():
        for one in pending.pop(step, []):
            engine.add(one)
        if step in cancelled:
            one_of = cancelled[step]
            engine.cancel(*([one_of] if isinstance(one_of, str) else one_of))
        for output in engine.step():
            answers.setdefault((output.request_id, output.index), Answer()).add(output)
        if after_step is not None:
            after_step(engine)
        step += 1
        assert step < 20_000, "the engine makes no progress"
    assert all(answer.finish_reason is not None for answer in answers.values())
    check_idle(engine)
    return answers


def check_idle(engine: Engine) -> None:
    """Check that no sequence is left and that every slot is free or cached."""
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.background == 0
    assert stats.slots_free + stats.slots_cached == stats.slots_total


def torch_runner(checkpoint: Checkpoint, slots: int) -> Runner:
    """Return the reference on the CPU; without torch the test that asks for it is skipped."""
    from midfill.runners.torch.runner import load_torch_runner

    return load_torch_runner(checkpoint, slots=slots)


def next_logits(runner: Runner, tokens: list[int]) -> Float32Array:
    """Return [vocab] float32 logits from a pass over the whole sequence: no engine, no cache."""
    length = len(tokens)
    slots = np.arange(length, dtype=np.int32)
    ends = np.array([0, length], dtype=np.int32)
    batch = ForwardBatch(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=slots,
        write_slots=slots,
        query_indptr=ends,
        kv_indptr=ends,
        kv_slots=slots,
        logit_rows=np.array([length - 1], dtype=np.int32),
    )
    return runner.logits_ops.to_numpy(runner.forward(batch)[0])


def greedy_alone(runner: Runner, prompt: list[int], count: int) -> list[int]:
    """Return the naive truth: every token from a pass over the whole sequence."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(runner, tokens).argmax()))
    return tokens[len(prompt) :]
