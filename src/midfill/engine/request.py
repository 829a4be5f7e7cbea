"""The engine's input and output: token ids and numbers, never text.

These structs cross the process boundary as msgpack, so they hold plain values only.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "expired", "error"]

TokenSpans = tuple[tuple[int, int], ...]
"""Number of the first token of each run of a prompt's tokens, and of what follows it."""


class EngineSamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Names and meanings follow the OpenAI API and vLLM.

    ``engine.validation`` holds the ranges.

    Attributes:
        max_tokens: maximum number of tokens to generate.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with this probability mass; 1 is off.
        min_p: drop tokens below this share of the most likely token's probability; 0 is off.
        typical_p: mass of locally typical sampling (Meister et al., 2022); 1 is off.
        presence_penalty: subtracted from the logit of each token generated before.
        frequency_penalty: subtracted once per earlier occurrence among the generated tokens.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or the answer (Keskar et al., 2019); 1 is off.
        seed: makes the request's sampling reproducible, whatever else is in the batch; None takes
            a random one.
        logit_bias: by token id, a value added to its logit.
        stop_token_ids: token ids that end the answer, in addition to the model's end tokens.
        ignore_eos: continue past the model's end tokens.
        logprobs: how many of the most likely tokens are reported per position; None reports
            nothing, 0 the sampled token only.
        prompt_logprobs: how many of the most likely tokens are reported for each of the prompt's
            tokens but the first; None reports nothing, 0 the prompt's own tokens only. The prompt
            is computed whole, whatever is cached of it, unless ``EngineRequest.score_from`` says
            that its beginning needs no report.
        n: number of answers; they share the prompt's KV.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1


class RequestHints(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says of a request for whoever schedules it; ``Hints`` is what policies see.

    Attributes:
        priority: lower values run first, as in vLLM.
        expected_tokens: how many tokens the answer will probably have; None says nothing.
        program: names the program that the request is a step of, such as an agent's task; "" for
            none. Names are a tenant's own.
        last_step: whether it is the program's last request.
        offline: whether nobody waits for it: it runs while no other request does, and its KV is
            evicted before all that others have used. The server's own word on rows of batches.
    """

    priority: int = 0
    expected_tokens: int | None = None
    program: str = ""
    last_step: bool = False
    offline: bool = False


NO_REQUEST_HINTS = RequestHints()


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for the engine.

    Attributes:
        request_id: unique among the requests in flight.
        token_ids: the whole prompt; at least one token.
        sampling: how the answers are sampled.
        tenant: whose prefix cache is used; tenants share nothing.
        begins_with: bytes that every answer has to begin with (token healing). Until they are
            written, only max_tokens can end the answer.
        empty_threshold: an answer is empty if, and only if, the model gives the empty answer more
            than this probability, see ``engine.sampling.empty_answer``; 1: never. 0 is off: end
            tokens are sampled like others.
        background: compute the prompt into the prefix cache while the engine is idle, and generate
            nothing. Ends with "stop", or with "cancelled" if newer background requests or a lack
            of slots displace it.
        stream_interval: maximum time in seconds for which tokens may be held back on their way to
            the server, to be sent together; infinity holds them until the answer ends.
        stop_bytes: tokens that contain one of these bytes are sent at once: the last bytes of the
            strings that end the answer.
        sent_at_once: how many of an answer's first tokens are sent at once, beside those up to its
            first text.
        compress_after: how many of the prompt's first tokens a method sees and compresses; the
            tokens after them are computed over what it keeps. 0 is the whole prompt.
        score_from: number of the first token that ``prompt_logprobs`` reports, at least 1. What
            comes before the token in front of it may be cached.
        method: compresses the prompt's KV or takes it from elsewhere, see ``methods.registry``;
            "none" computes and keeps all of it, None leaves it to the engine.
        deadline: when the client gives up, by ``time.monotonic``, a clock that processes of a
            machine share; None is never. Answers that are streamed need a token by then, others
            must be complete; otherwise they end with "expired".
        contexts: numbers of the first token of each file that the prompt shows, in order, and of
            what follows them; empty if it shows none. Only methods that compute files apart from
            each other ask for it.
        head_tokens: how many of the prompt's first tokens stand before the text after the caret, in
            layouts that go on after it: when the caret has moved on, a longer head begins with
            them. 0 says nothing.
        before_caret, after_caret: where the document's text stands in the prompt, in the order of
            the text; empty if there is no caret. Only methods that go by the distance to the caret
            ask for it.
        document: the planner's id of the document; "" if there is none. An engine of several
            machines keeps a document's KV in one place.
        prediction: likely tokens of the answer, which are drafted as long as it begins with them.
            Drafts change no answer.
        answered: first tokens of the answer, which another engine has generated; the answer goes on
            after them as it would have there, and they are not sent again. Whether it is empty was
            decided there: it isn't.
        hints: what the client says of it for the scheduler.
    """

    request_id: str
    token_ids: list[int]
    sampling: EngineSamplingParams
    tenant: str = ""
    begins_with: bytes = b""
    empty_threshold: float = 0.0
    background: bool = False
    stream_interval: float = 0.0
    stop_bytes: bytes = b""
    sent_at_once: int = 0
    compress_after: int = 0
    score_from: int = 1
    contexts: tuple[int, ...] = ()
    before_caret: TokenSpans = ()
    after_caret: TokenSpans = ()
    method: str | None = None
    head_tokens: int = 0
    document: str = ""
    prediction: list[int] = []
    answered: list[int] = []
    deadline: float | None = None
    hints: RequestHints = NO_REQUEST_HINTS

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for its answer: it is neither background work nor offline."""
        return not self.background and not self.hints.offline


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities (natural logarithm, of the model's own distribution) at one position.

    Attributes:
        logprob: the sampled token's, or the prompt's token's.
        top: (token id, logprob) of the most likely tokens, best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one answer of one request.

    Attributes:
        request_id: the request's id.
        index: which of its n answers.
        token_ids: new tokens since the last output, a stop token included.
        logprobs: one entry per new token; None if not requested.
        finish_reason: why the answer ended; None while it continues.
        cached_tokens: prompt tokens whose KV was found in the cache when the prompt was admitted;
            None as long as an engine elsewhere has not told.
        reused_tokens: further prompt tokens whose KV was copied from elsewhere, by a method of
            reuse, and kept.
        error: what went wrong, if finish_reason is "error".
        empty_probability: how probable an empty answer was; an upper bound where that is not above
            the request's threshold. None if it was not asked for.
        prompt_logprobs: one entry per token of the prompt, from the second on (or from
            ``score_from`` on), in the first output of the first answer; None elsewhere and if not
            requested.
        prefill_seconds: time from the prompt's admission, when it left the queue, to this output;
            in the first output of the first answer, None elsewhere.
        token_bytes: what each new token stands for, from an engine that answers in text; it may not
            know ids, and writes -1 in their place. None leaves it to the tokenizer.
        prompt_tokens, completion_tokens: how many tokens there are, over all answers, as counted
            by an engine that tokenises for itself; None leaves it to whoever reads the outputs.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = 0
    reused_tokens: int = 0
    error: str | None = None
    empty_probability: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prefill_seconds: float | None = None
    token_bytes: list[bytes] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the warm tier holds and did since the engine's start.

    Attributes:
        used_bytes, capacity_bytes: of its files, by folder: memory, disk.
        loaded_chunks: read, by folder.
        evicted_chunks: removed to make room, by folder.
        loaded_tokens: tokens whose KV came from it.
        stored_tokens: tokens whose KV was handed to it.
        rejected_chunks: removed since they were damaged, or not what their name says.
        failed_writes: not written for lack of space or another error.
        dropped_chunks: not stored since their KV was evicted first.
    """

    used_bytes: dict[str, int]
    capacity_bytes: dict[str, int]
    loaded_chunks: dict[str, int]
    evicted_chunks: dict[str, int]
    loaded_tokens: int = 0
    stored_tokens: int = 0
    rejected_chunks: int = 0
    failed_writes: int = 0
    dropped_chunks: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's gauges and counters; counters grow from the engine's start.

    Attributes:
        running: answers that hold slots.
        waiting: queued answers; a new request counts as one.
        slots_total: KV slots (tokens) in the pool.
        slots_free: free slots.
        slots_cached: evictable slots: held by the prefix cache and used by no sequence.
        slots_pinned: slots that are kept for programs whose next request is awaited; no sequence
            uses them.
        prompt_tokens: prompt tokens of admitted requests, but not of those that another engine has
            begun to answer.
        cached_tokens: how many of these were found in the prefix cache.
        reused_tokens: prompt tokens of which methods of reuse copied KV from elsewhere and kept it.
        computed_tokens: rows that went through the model, prefill and decode; rows of blended
            prompts count by the share of the layers that they went through.
        generated_tokens: sampled tokens.
        preemptions: sequences that went back to the queue for lack of slots, or offline ones for
            others.
        evicted_tokens: slots that the prefix cache has evicted.
        cache_nodes: runs of tokens that the prefix cache's trees consist of.
        cache_index_bytes: memory of these trees, without the KV.
        steps: forward passes.
        busy_seconds: time spent in steps.
        forward_seconds: how much of it was spent in forward passes.
        sampling_seconds: how much of it was spent sampling.
        background: unfinished background requests. They count as neither running nor waiting, and
            their tokens only in computed_tokens and background_tokens.
        background_tokens: how many of computed_tokens belong to background requests.
        layered_prompts: how often a prompt was admitted to be prefilled by layers.
        layered_fallbacks: how often one was admitted to be prefilled in chunks instead, since slots
            were too few.
        drafts: drafts that were verified.
        draft_tokens: their tokens, each of which is one of computed_tokens.
        accepted_tokens: how many of these were right; each is one of generated_tokens.
        listed_pairs: products of a query with a key in chunks of prompts whose keys a method of
            sparse prefill lists, in all layers and query heads.
        causal_pairs: how many dense attention has for the same chunks.
        loading: queued answers whose KV is on its way to the cache; ``waiting`` leaves them out.
        states_total: states that there is room for, beside the slots; 0 in models without.
        states_used: those of sequences that hold slots.
        state_snapshots: those that are kept beside the prefix cache. The rest are free.
        snapshots_reused: how often a sequence has started from a snapshot.
        snapshots_evicted: snapshots that gave their place to another state, or went when the prefix
            cache evicted their token.
        exported_bytes, imported_bytes: KV that left the cache as bytes, or came to it so; the warm
            tier's is not counted here.
        warm_tier: what the warm tier did; None without one.
    """

    running: int = 0
    waiting: int = 0
    slots_total: int = 0
    slots_free: int = 0
    slots_cached: int = 0
    slots_pinned: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_tokens: int = 0
    cache_nodes: int = 0
    cache_index_bytes: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    forward_seconds: float = 0.0
    sampling_seconds: float = 0.0
    background: int = 0
    background_tokens: int = 0
    layered_prompts: int = 0
    layered_fallbacks: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    listed_pairs: int = 0
    causal_pairs: int = 0
    loading: int = 0
    states_total: int = 0
    states_used: int = 0
    state_snapshots: int = 0
    snapshots_reused: int = 0
    snapshots_evicted: int = 0
    exported_bytes: int = 0
    imported_bytes: int = 0
    warm_tier: TierStats | None = None


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part of ``EngineStats``, which documents each."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
