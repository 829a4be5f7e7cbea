"""MethodKinds: puts a request's methods to work on its sequence, whichever kinds they are of.

A kind is a folder beside this file with a ``MethodKind``. A new kind is one entry in ``kinds_of``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from midfill.arrays import Int32Array
from midfill.errors import InvalidRequestError
from midfill.kv.pool import KVPool
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.contexts.sequence import ContextKind
from midfill.methods.episodes.sequence import EpisodeCounts, EpisodeKind
from midfill.methods.evict.eviction import Eviction
from midfill.methods.evict.sequence import EvictionKind
from midfill.methods.evict.succession import in_succession
from midfill.methods.latents.method import PartedLatents
from midfill.methods.latents.sequence import PartedLatentsKind
from midfill.methods.method import Method, methods_in
from midfill.methods.reuse.sequence import ReuseKind
from midfill.methods.rows.sequence import PruningKind
from midfill.methods.sentences.sequence import SentenceKind, SentenceReads
from midfill.methods.sequence_method import (
    NO_METHOD,
    MethodKind,
    RequestFacts,
    SequenceMethod,
    SequenceView,
    compose,
)
from midfill.methods.sparse_decode.sequence import DecodeReads, SparseDecodeKind
from midfill.methods.sparse_prefill.sequence import SparsePrefillKind
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import KeyPairs
from midfill.runners.forward.runner import Runner

_TRIAL_TOKENS = 1024
"""A trial has room for files, however short the model's context is."""


def unsuited(config: ModelConfig, *, treats_latents: bool = False) -> str | None:
    """Return why methods can't treat a model's KV; None if they can.

    Args:
        config: the model.
        treats_latents: whether they are made for latent attention.
    """
    if config.vectors_per_cell == 1 and not treats_latents:
        return (
            "methods are not possible with latent attention, whose keys are values, too, but for"
            " tpla"
        )
    if config.state_space is not None:
        return "methods are not possible with models whose layers have a state instead of KV"
    if config.kv_sharing_layers:
        return "methods are not possible with models some of whose layers share their KV"
    return None


class MethodKinds:
    """The kinds of methods that an engine knows, over all of its sequences.

    Attributes:
        key_pairs: what was computed of prompts' attention where keys were listed.
    """

    def __init__(self, runner: Runner, pool: KVPool, further: Sequence[MethodKind] = ()) -> None:
        """Create them.

        Args:
            runner: the model and its KV cache.
            pool: the runner's slots.
            further: kinds beside the registered ones.
        """
        self._slots = runner.slots
        self._config = runner.config
        self._longest = max(_TRIAL_TOKENS, runner.config.context)
        sparse = SparsePrefillKind(runner.config)
        self.key_pairs: KeyPairs = sparse.pairs
        self._sparse_decode = SparseDecodeKind(runner.config, pool)
        self._sentences = SentenceKind(runner, pool)
        eviction = Eviction(runner, pool)
        self._episodes = EpisodeKind(runner, eviction)
        # In the order in which they arrange a sequence's rows and decide about its KV. Summaries of
        # pages are found by the slots that they have before others are evicted.
        self._kinds: tuple[MethodKind, ...] = (
            ContextKind(runner, pool),
            ReuseKind(runner, pool),
            PruningKind(runner),
            sparse,
            self._sparse_decode,
            EvictionKind(runner, eviction),
            self._sentences,
            self._episodes,
            PartedLatentsKind(),
            *further,
        )

    @property
    def decode_reads(self) -> DecodeReads:
        """What was read of answers' KV where rows choose their keys."""
        return self._sparse_decode.reads

    @property
    def sentence_reads(self) -> SentenceReads:
        """What was read of answers' KV where sentences are looked up, and what was moved for it."""
        return self._sentences.reads

    @property
    def episode_counts(self) -> EpisodeCounts:
        """What was done where conversations have a cache per episode."""
        return self._episodes.counts

    def take_parked_bytes(self) -> int:
        """See ``Engine.take_parked_bytes``."""
        taken = 0
        for counts in (self._sentences.reads, self._episodes.counts):
            taken, counts.parked_bytes = max(taken, counts.parked_bytes), 0
        return taken

    def check(self, method: Method | None) -> None:
        """Check that a method's parts can stand together, on a request that all of them act on.

        Raises:
            InvalidRequestError: two of them can't; names both, and why.
        """
        trial = _Trial(self._longest)
        facts = RequestFacts(trial.prompt_length, trial.prompt_length, contexts=(1, 300, 600))
        self.attach(method, facts, trial)

    def attach(
        self, method: Method | None, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod:
        """Return what works on a new sequence; nothing is changed.

        Raises:
            InvalidRequestError: the request wants what a method can't do, or two of its methods
                can't stand together.
        """
        if method is None:
            return NO_METHOD
        treats_latents = all(isinstance(each, PartedLatents) for _, each in methods_in(method))
        reason = unsuited(self._config, treats_latents=treats_latents)
        if reason is not None:
            raise InvalidRequestError(reason, param="method")
        found = [
            kind.attach(name, each, request, sequence)
            for kind in self._kinds
            for name, each in in_succession(methods_in(method))
        ]
        return compose(each for each in found if each is not None)

    def max_length(self, method: Method | None, request: RequestFacts, context: int) -> int:
        """Return how many tokens of a request, prompt and answer together, can be served.

        Args:
            method: of the request.
            request: see above.
            context: how many positions the model has.
        """
        if method is None:
            return min(context, self._slots)
        methods = [each for _, each in methods_in(method)]
        for kind in self._kinds:
            context = kind.max_length(methods, request, context)
        fitting = (kind.fitting_tokens(methods, request) for kind in self._kinds)
        return min(context, _first_of(fitting, self._slots))

    def longest_prompt(self, method: Method | None, context: int) -> int:
        """Return how long a prompt may be, its answer's first token included.

        Args:
            method: of its request.
            context: how many positions the model has.
        """
        methods = [each for _, each in methods_in(method)]
        fitting = (kind.longest_prompt(methods, context) for kind in self._kinds)
        return min(context, _first_of(fitting, self._slots))


def _first_of(bounds: Iterable[int | None], otherwise: int) -> int:
    """Return the first bound that a kind has set."""
    return next((bound for bound in bounds if bound is not None), otherwise)


@dataclass(frozen=True)
class _Trial:
    """A sequence that is never run; implements ``SequenceView``.

    It has the longest prompt, since some methods act on long ones only.
    """

    prompt_length: int
    tenant: str = ""
    computed: int = 0
    checked_tokens: int = 0
    may_be_empty: bool = False
    next_scored: int | None = None
    kv: SequenceKV | None = None

    @property
    def length(self) -> int:
        """The prompt's: nothing is answered yet."""
        return self.prompt_length

    @property
    def max_length(self) -> int:
        """Room for one token of an answer."""
        return self.prompt_length + 1

    @property
    def tokens(self) -> Int32Array:
        """[prompt_length] int32."""
        return np.zeros(self.prompt_length, np.int32)
