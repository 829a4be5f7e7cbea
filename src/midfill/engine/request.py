"""What goes into the engine and what comes out: token ids and numbers, never text.

These structs cross the process boundary as msgpack, so they hold plain values only.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]


class EngineSamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Field names and meanings follow the OpenAI API and vLLM.

    Attributes:
        max_tokens: most tokens to generate; >= 1.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set with this probability mass; in (0, 1].
        min_p: drop tokens below min_p times the likeliest one's probability; in [0, 1].
        typical_p: locally typical sampling's mass (Meister et al., 2022); 1 is off.
        presence_penalty: subtracted from the logit of each token generated before.
        frequency_penalty: the same, times how often.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or the output (Keskar et al., 2019); 1 is off.
        seed: makes a request's sampling reproducible, whatever else is in the batch.
        logit_bias: token id -> value added to its logit.
        stop_token_ids: token ids that end the answer (beside the model's own end tokens).
        ignore_eos: go on past the model's own end tokens.
        logprobs: how many of the likeliest tokens to report a position; None reports nothing,
            0 reports the chosen token alone.
        n: answers to draw from one prompt; they share the prompt's KV.
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
    n: int = 1


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for the engine.

    Attributes:
        request_id: unique among the requests in flight.
        token_ids: the whole prompt; at least one token.
        sampling: how to go on from it.
        tenant: whose prefix cache to use; caches of different tenants never touch.
        begins_with: bytes that every answer has to begin with (token healing); nothing ends it
            before but max_tokens, and afterwards it is free.
        background: compute the prompt into the prefix cache while no other request is there, and
            generate nothing. Ends with "stop", or with "cancelled" when newer ones or a lack of
            slots push it out.
        stream_interval: seconds for which tokens that nobody waits for may be held back on their
            way to the server, to be told together; infinity: until the answer ends.
        stop_bytes: tokens that hold one of these bytes are told at once: the last bytes of the
            strings that end the answer.
    """

    request_id: str
    token_ids: list[int]
    sampling: EngineSamplingParams
    tenant: str = ""
    begins_with: bytes = b""
    background: bool = False
    stream_interval: float = 0.0
    stop_bytes: bytes = b""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities (natural log, of the model's own distribution) at one position.

    Attributes:
        logprob: of the token that was chosen.
        top: (token id, logprob) of the likeliest tokens, best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one answer of one request.

    Attributes:
        request_id: the request's.
        index: which of its n answers.
        token_ids: new tokens since the last output; an end or stop token is included.
        logprobs: one entry a new token, or None when not asked for.
        finish_reason: None while the answer goes on.
        cached_tokens: prompt tokens whose KV was found in the cache when the prompt was admitted.
        error: what went wrong, when finish_reason is "error".
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's gauges and counters; counters grow from the engine's start.

    Attributes:
        running, waiting: requests now in the running set and in the queue.
        slots_total, slots_free, slots_cached: KV slots (tokens): all, unused, and held by the
            prefix cache with nobody using them (evictable).
        prompt_tokens: prompt tokens of admitted requests.
        cached_tokens: of these, found in the prefix cache.
        computed_tokens: rows that went through the model (prefill and decode).
        generated_tokens: tokens sampled.
        preemptions: requests put back into the queue for lack of slots.
        evicted_tokens: slots the prefix cache gave up.
        steps: forward passes.
        busy_seconds: time spent in steps.
        forward_seconds, sampling_seconds: of it, in forward passes and in choosing tokens.
        background: background requests not yet ended; they count as neither running nor waiting,
            and in none of the counters of tokens but the next one and computed_tokens.
        background_tokens: of computed_tokens, the ones of background requests.
        drafts: drafts that were verified.
        draft_tokens: their tokens; each is one of computed_tokens.
        accepted_tokens: of these, the ones that were right; each is one of generated_tokens.
    """

    running: int = 0
    waiting: int = 0
    slots_total: int = 0
    slots_free: int = 0
    slots_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    forward_seconds: float = 0.0
    sampling_seconds: float = 0.0
    background: int = 0
    background_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
