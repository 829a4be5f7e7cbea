"""load_engine: from a checkpoint to an engine that is ready for requests."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from midfill.arrays import Float32Array
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.kv_transfer.transfers import IdentitySource, layout_name
from midfill.engine.kv_transfer.warm_cache import open_warm_tier
from midfill.engine.messages import EngineInfo
from midfill.engine.scheduling.drafting import AcceptanceRates
from midfill.engine.scheduling.policies.background_prefill import BackgroundPrefill
from midfill.engine.scheduling.policies.layered_prefill import LayeredPrefill
from midfill.engine.scheduling.policies.online_first import OnlineFirst
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.smart_spec import SmartSpec
from midfill.engine.scheduling.programs import Programs, RebuildCost
from midfill.engine.scheduling.registry import resolve_scheduler
from midfill.engine.scheduling.scheduler import SchedulerPolicy
from midfill.engine.scheduling.step_cost import StepCost, StepTimeLimit
from midfill.engine.scheduling.tool_calls import find_tool
from midfill.engine.sequences.retention import Retention, RetentionPolicy
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.speculation import Speculation
from midfill.errors import InvalidRequestError, OptionError
from midfill.kv.blob import KvIdentity
from midfill.kv.tiers.warm_tier import WarmTier
from midfill.methods.codecs import open_codec
from midfill.methods.method import Method
from midfill.methods.resolver import (
    AllowedMethods,
    MethodResolver,
    default_method,
    infilling_method,
)
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.checkpoint import ADAPTER_KEY, Checkpoint
from midfill.models.checkpoints.model_record import reuse_method_of
from midfill.models.checkpoints.model_store import command_options
from midfill.models.checkpoints.opening import model_digest
from midfill.models.config import ModelConfig
from midfill.models.sentence_encoder import SentenceEncoder
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from midfill.runners.loading import load_runner, max_running, options_for_device
from midfill.runners.rope import ROPE_VERSION
from midfill.system.progress import Progress

_log = logging.getLogger(__name__)

_STEP_SECONDS = 0.075
"""Steps with prompts should take no longer: a keystroke's request may have to wait for one before
its own, and both together should take no more than 150 ms."""
_SHORT_SHARE = 0.5
"""Of a step, for keystrokes beside a long prompt."""
_LOOKAHEAD = 256
"""Waiting sequences that a queue order sees: sorting more would take longer than it gains."""


def load_engine(
    checkpoint: Checkpoint,
    options: ModelOptions,
    progress: Progress | None = None,
    started: float | None = None,
    wrap: Callable[[Runner], Runner] | None = None,
    extra_methods: Mapping[str, Method] | None = None,
) -> tuple[Engine, Runner, EngineInfo]:
    """Load the model, choose the policies and build the engine.

    Args:
        checkpoint: the model.
        options: how it is run.
        progress: called with (stage, done, total) while the model loads.
        started: ``time.perf_counter()`` when loading began; None means now.
        wrap: returns what the engine steps in the runner's place, such as one that looks at logits.
        extra_methods: beside the registered ones, by the names under which requests ask for them.

    Returns:
        (engine, runner, info): the engine, the runner it steps, and a description of both.

    Raises:
        MidfillError: the checkpoint or the options can't be used.
    """
    started = time.perf_counter() if started is None else started
    extra = {} if extra_methods is None else extra_methods
    method = default_method(options.method, options.latent_parts)
    options = msgspec.structs.replace(options, method=method)
    reuse = infilling_method(options.reuse, options.method, reuse_method_of(checkpoint))
    allowed = AllowedMethods(options.allow_methods, options.method, reuse)
    _check_state_options(checkpoint.config, options)
    folder = options.sentence_encoder
    encoder = None if folder is None else SentenceEncoder.open(Path(folder))
    runner = load_runner(checkpoint, options, progress)
    options = options_for_device(options)
    options = _limited_by_states(options, runner)
    embed = None if encoder is None else encoder.encode
    resolver = MethodResolver(lambda: _served_model(checkpoint, runner, options, embed), allowed)
    source = IdentitySource(
        lambda: kv_identity(checkpoint, runner, options), options.warm_tier.scope
    )
    try:
        engine = Engine(
            runner if wrap is None else wrap(runner),
            checkpoint.tokenizer.eos_token_ids,
            EngineOptions(
                max_running=options.max_running,
                context=options.context,
                lookahead=lookahead(options),
            ),
            policy=scheduler_policy(options, runner.config.layers),
            speculation=speculation(options),
            step_limit=step_limit(options),
            retention=retention(options, tool_reader(checkpoint.tokenizer)),
            token_bytes=checkpoint.tokenizer.token_bytes,
            method=resolver.default,
            find_method=lambda name: extra[name] if name in extra else resolver.find(name),
            kv_source=source,
            warm_tier=_open_warm_tier(options, source, runner, checkpoint.tokenizer),
        )
    except InvalidRequestError as error:
        raise OptionError(f"--method {options.method}: {error}") from None
    try:
        engine.check_method(resolver.infilling)
    except InvalidRequestError as error:
        raise OptionError(f"--reuse {reuse}: {error}") from None
    return engine, runner, _describe(engine, checkpoint, runner, options, reuse, started)


def _limited_by_states(options: ModelOptions, runner: Runner) -> ModelOptions:
    """Return the options with as many answers at a time as there are states for, and log that."""
    if runner.states is None:
        return options
    running = max_running(options, runner.states.count)
    _log.info(
        "layers with a state: %d states of %d bytes, at most %d answers at a time, no drafts",
        runner.states.count, runner.states.nbytes // runner.states.count, running,
    )  # fmt: skip
    return msgspec.structs.replace(options, max_running=running)


def _describe(
    engine: Engine,
    checkpoint: Checkpoint,
    runner: Runner,
    options: ModelOptions,
    reuse: str,
    started: float,
) -> EngineInfo:
    """Return what clients are told of an engine."""
    return EngineInfo(
        backend=runner.description,
        layers=runner.config.layers,
        weight_bytes=runner.weight_bytes,
        kv_bytes=runner.kv_bytes,
        slots=runner.slots,
        context=engine.context,
        max_running=options.max_running,
        load_seconds=time.perf_counter() - started,
        adapter=str(name) if (name := checkpoint.metadata.get(ADAPTER_KEY)) is not None else None,
        method=options.method,
        reuse=reuse,
    )


def _check_state_options(config: ModelConfig, options: ModelOptions) -> None:
    """Check that nothing is asked for that models with states can't do.

    Raises:
        OptionError: something is.
    """
    if config.state_space is None:
        return
    tier = options.warm_tier
    if tier.memory or tier.disk:
        raise OptionError(
            "--warm-tier-memory and --warm-tier-disk are not possible with this model: it has"
            " layers with a state, which a tier doesn't keep; leave them out"
        )


def scheduler_policy(options: ModelOptions, layers: int) -> SchedulerPolicy:
    """Return the policy that decides what each step runs, drafts excepted.

    Args:
        options: how the model is run.
        layers: of the model.

    Raises:
        InvalidRequestError: there is no such policy.
    """
    chosen = resolve_scheduler(options.scheduler)
    chunked = chosen.build_batching(
        options.step_tokens, options.max_running, short_share=_SHORT_SHARE
    )
    policy: SchedulerPolicy = LayeredPrefill(chunked, layers, chosen.by_layers)
    if chosen.order is not None:
        policy = OrderedAdmission(policy, chosen.order)
    return OnlineFirst(BackgroundPrefill(policy), options.offline_step_tokens)


def lookahead(options: ModelOptions) -> int:
    """Return how many waiting sequences the policy chooses among; 0 if it takes the first ones."""
    return 0 if resolve_scheduler(options.scheduler).order is None else _LOOKAHEAD


def retention(options: ModelOptions, tool_of: Callable[[Sequence], str]) -> Retention | None:
    """Return what keeps the KV of programs between their requests; None if no policy does.

    Args:
        options: how the model is run.
        tool_of: see ``Retention``.
    """
    order: object = resolve_scheduler(options.scheduler).order
    if not isinstance(order, RetentionPolicy):
        return None
    cost = RebuildCost(StepCost(), options.step_tokens)
    return Retention(order, Programs(cost), tool_of)


def tool_reader(tokenizer: Tokenizer) -> Callable[[Sequence], str]:
    """Return what finds the tool that a sequence's answer calls in its text."""

    def tool_of(sequence: Sequence) -> str:
        token_ids = sequence.tokens[sequence.prompt_length :].tolist()
        answer = b"".join(map(tokenizer.token_bytes, token_ids))
        return find_tool(answer.decode("utf-8", errors="replace"))

    return tool_of


def step_limit(options: ModelOptions) -> StepTimeLimit:
    """Return what keeps steps short, knowing nothing yet of what they cost."""
    return StepTimeLimit(_STEP_SECONDS, StepCost(), options.step_tokens)


def speculation(options: ModelOptions) -> Speculation | None:
    """Return what proposes and chooses drafts; None if ``options`` turn them off."""
    if not options.speculation:
        return None
    return Speculation(SmartSpec(options.step_tokens), AcceptanceRates(), StepCost())


def _open_warm_tier(
    options: ModelOptions, source: IdentitySource, runner: Runner, tokenizer: Tokenizer
) -> WarmTier | None:
    tier = options.warm_tier
    if not tier.memory and not tier.disk:
        return None
    codec = open_codec(tier.codec, runner, tokenizer, lambda: source.identity.name)
    return open_warm_tier(tier, source, runner, codec)


def kv_identity(checkpoint: Checkpoint, runner: Runner, options: ModelOptions) -> KvIdentity:
    """Return what KV that a runner computes is bound to.

    It changes with all that could change a bit of it: the model with its adapter, how weights are
    stored, and the kernels.
    """
    fields = (
        checkpoint.content_digest, options.weights, repr(checkpoint.config), ROPE_VERSION,
        runner.build,
    )  # fmt: skip
    return KvIdentity(hashlib.sha256(repr(fields).encode()).hexdigest(), layout_name(runner))


def _served_model(
    checkpoint: Checkpoint,
    runner: Runner,
    options: ModelOptions,
    embed: Callable[[str], Float32Array] | None,
) -> ServedModel:
    """Return what methods may know of the model."""
    return ServedModel(
        config=checkpoint.config,
        backend="cpu" if isinstance(runner, CpuRunner) else "torch",
        digest=model_digest(checkpoint),
        options=command_options(checkpoint.path, options.adapter_path),
        kv_cache_dtype=runner.cells.layout.dtype,
        token_bytes=checkpoint.tokenizer.token_bytes,
        encode=checkpoint.tokenizer.encode,
        embed=embed,
        latent_parts=options.latent_parts or 1,
    )
