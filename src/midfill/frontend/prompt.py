"""Prompt: token ids ready for the engine, with what is known of the text around the caret.

Stop strings may name tokens (``with_token_stops``): editors send a model family's end tokens as
``stop`` strings. A special token has no text, so no stop string would ever find it in an answer.
One of the served model's own therefore ends the answer as a token; an end token does so anyway, and
such an end is an ordinary one, for which no stop is to blame. Tokens of other families mean nothing
here: with an infilling request they are dropped, since they could only end an answer that is about
such tokens.
"""

import dataclasses
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from midfill.engine.request import (
    NO_REQUEST_HINTS,
    EngineRequest,
    EngineSamplingParams,
    RequestHints,
    TokenSpans,
)
from midfill.errors import InvalidRequestError
from midfill.frontend.answer_format import AnswerChannels
from midfill.frontend.sampling import SamplingParams
from midfill.infill.confidence import START_TOKENS, ConfidenceRule
from midfill.infill.layout import LayoutName, PromptLayout, Role, TextSegment
from midfill.infill.request import InfillRequest
from midfill.infill.template import sentinel_texts
from midfill.models.tokens.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""A turn of a chat: its role, its content, and further JSON that a chat template may read."""


MAX_MESSAGES = 1 << 14
"""Of a conversation; each costs some time before anything is known of the prompt's tokens."""


def check_message_count(count: int) -> None:
    """Refuse a conversation of too many messages.

    Raises:
        InvalidRequestError: it has more than MAX_MESSAGES.
    """
    if count > MAX_MESSAGES:
        raise InvalidRequestError.of_field(
            "messages", f"has {count} entries; at most {MAX_MESSAGES} are accepted"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """What a client wants a prompt to be made of.

    Attributes:
        text: the text around a caret, or a raw one.
        token_ids: token ids instead.
        messages: a conversation instead. Beside ``text``: its place is taken where ``text`` is a
            raw one that no FIM template was filled in for, if the model has a chat template.
        template_fields: what the chat template may read beside them: JSON, such as ``tools``.
        tenant: who sends ``messages``.
        healing, stop_token_ids: see ``PromptEncoder.infill``.
        empty_threshold: see ``Prompt.with_empty_threshold``.
        method: see ``Prompt.with_method``.
        prediction: what the answer will probably be, as the client says; "" leaves it to the last
            answers in the document.
        field_names: how the client spells fields that an error may name.
    """

    text: InfillRequest | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    template_fields: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = ""
    healing: bool = True
    stop_token_ids: Sequence[int] = ()
    empty_threshold: float | None = None
    method: str | None = None
    prediction: str = ""
    field_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """How a prompt was laid out; clients see it in the response's ``midfill`` object.

    Attributes:
        layout: the layout that was chosen.
        cut: number of the prefix's characters that stand before the suffix in the prompt; None
            for a raw prompt.
        sentinels: whether the model has FIM tokens. Without them it sees neither the suffix nor
            other files.
        document: the planner's id of the document; None if it keeps none.
        healed: number of bytes before the caret that the model writes again.
        window: number of characters before and after the caret that the prompt holds; None for a
            raw prompt.
        template: the first sentinel of the template that the client had filled in, if it had.
    """

    layout: LayoutName
    cut: int | None
    sentinels: bool
    document: str | None = None
    healed: int = 0
    window: tuple[int, int] | None = None
    template: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        token_ids: never empty.
        text: what the client sent before the caret, to be echoed.
        report: how it was laid out; None for chats and token ids.
        stop_token_ids: tokens that end the answer, in addition to the model's own end tokens.
        end_bias: added to these tokens' logits.
        empty_threshold: see ``EngineRequest``; 0 for raw prompts, chats and token ids.
        begins_with: the last bytes before the caret if they are left out of ``token_ids``, so that
            the answer has to begin with them (token healing).
        prefix, suffix: the text around the caret, as far as it is known.
        infilling: whether the client sent the text around a caret: a suffix, or a filled-in
            template.
        line_break: see ``PromptLayout``; a part of ``suffix``.
        layout: what ``token_ids`` was made of; None for chats and token ids.
        parts: the ids of BOS and of each of the layout's segments, also those that were left out.
        method: compresses its KV, see ``EngineRequest``.
        contexts: where the files that it shows begin and end, see ``EngineRequest``.
        confidence_rule: how sure the model's answers to infilling requests are; None if unknown.
        channels: tells the text of an answer from what stands beside it; None if all is text.
        prediction: likely tokens of the answer, see ``EngineRequest``.
    """

    token_ids: list[int]
    text: str
    report: LayoutReport | None = None
    stop_token_ids: tuple[int, ...] = ()
    end_bias: float = 0.0
    empty_threshold: float = 0.0
    begins_with: bytes = b""
    prefix: str = ""
    suffix: str = ""
    infilling: bool = False
    line_break: str = ""
    layout: PromptLayout | None = None
    parts: tuple[Sequence[int], ...] = ()
    method: str | None = None
    contexts: tuple[int, ...] = ()
    confidence_rule: ConfidenceRule | None = None
    channels: AnswerChannels | None = None
    prediction: tuple[int, ...] = ()

    @property
    def is_verbatim(self) -> bool:
        """Whether it is a raw text, sent as it is; chats and token ids are none."""
        return self.report is not None and self.report.layout == "verbatim"

    @property
    def head_tokens(self) -> int:
        """See ``EngineRequest``; 0 where no suffix follows the text before the caret."""
        if self.layout is None or not self.parts:
            return 0
        tokens, head = len(self.parts[0]), 0
        for segment, part in zip(self.layout.segments, self.parts[1:], strict=True):
            tokens += len(part)
            role = segment.role if isinstance(segment, TextSegment) else None
            if role == "suffix":
                return head
            head = tokens if role == "prefix" else head
        return 0

    @property
    def document(self) -> str:
        """The planner's id of the document; "" if it keeps none."""
        return "" if self.layout is None else self.layout.document or ""

    def with_empty_threshold(self, asked: float | None) -> "Prompt":
        """Return the prompt with the threshold that a client asks for; None keeps the model's.

        Raises:
            InvalidRequestError: it is no probability, or the prompt is raw, a chat or token ids.
        """
        if asked is None:
            return self
        if self.report is None or self.is_verbatim:
            raise InvalidRequestError.of_field(
                "empty_threshold",
                "needs a suffix, or a prompt that is the model's FIM format filled in",
            )
        if not 0.0 <= asked <= 1.0:
            raise InvalidRequestError.of_field(
                "empty_threshold", f"must be a number from 0 to 1, not {asked:g}"
            )
        return dataclasses.replace(self, empty_threshold=asked)

    def with_method(self, method: str | None) -> "Prompt":
        """Return the prompt with a method that compresses its KV; see ``EngineRequest``."""
        return self if method is None else dataclasses.replace(self, method=method)

    def request(
        self,
        request_id: str,
        sampling: SamplingParams,
        tenant: str = "",
        stream_interval: float = 0.0,
        deadline: float | None = None,
        hints: RequestHints = NO_REQUEST_HINTS,
    ) -> EngineRequest:
        """Return the request for the engine; see ``EngineRequest`` for the arguments.

        ``ignore_eos`` asks for text whatever the model says, so then no answer is empty by rule.
        """
        streamed = stream_interval < math.inf
        if not self.infilling or (self.confidence_rule is None and sampling.min_confidence):
            sampling = msgspec.structs.replace(sampling, min_confidence=None)
        sent_at_once = START_TOKENS if sampling.min_confidence and streamed else 0
        if not self.infilling or sampling.n > 1:
            sampling = msgspec.structs.replace(sampling, candidates=1)
        elif sampling.candidates > 1:
            sent_at_once = sampling.max_tokens  # each token may start a branch, or end one
        return EngineRequest(
            request_id=request_id,
            token_ids=self.token_ids,
            sampling=sampling.for_engine(self.stop_token_ids, len(self.begins_with), self.end_bias),
            tenant=tenant,
            begins_with=self.begins_with,
            empty_threshold=0.0 if sampling.ignore_eos else self.empty_threshold,
            stream_interval=stream_interval,
            stop_bytes=sampling.stop_bytes,
            sent_at_once=sent_at_once,
            method=self.method,
            contexts=self.contexts,
            head_tokens=self.head_tokens,
            before_caret=self._token_spans("prefix", "increment"),
            after_caret=self._token_spans("suffix"),
            document=self.document,
            prediction=list(self.prediction),
            deadline=deadline,
            hints=hints,
        )

    def _token_spans(self, *roles: Role) -> TokenSpans:
        """Return where the tokens of text with some roles are, without those that were left out.

        The text of a role, or of a head and what follows the suffix, stands in the prompt in the
        order that it has in the document.
        """
        if self.layout is None or not self.parts:
            return ()
        spans, at = [], len(self.parts[0])
        for segment, ids in zip(self.layout.segments, self.parts[1:], strict=True):
            end = min(at + len(ids), len(self.token_ids))
            if isinstance(segment, TextSegment) and segment.role in roles and at < end:
                spans.append((at, end))
            at += len(ids)
        return tuple(spans)

    def background_request(self, tenant: str) -> EngineRequest:
        """Return the request to compute the prompt while the engine is idle, and generate nothing.

        The prompt's method doesn't count: what is computed is its exact KV.
        """
        return EngineRequest(
            request_id=f"prefill-{uuid.uuid4().hex}",
            token_ids=self.token_ids,
            sampling=EngineSamplingParams(),
            tenant=tenant,
            background=True,
            head_tokens=self.head_tokens,
            document=self.document,
        )


class PromptAnswer(NamedTuple):
    """A prompt and the model's answer, as far as there is one.

    Attributes:
        prompt: the prompt.
        token_ids: of the answer, healed bytes and all.
        written: what they stand for, from an engine that answers in text; None from others.
    """

    prompt: Prompt
    token_ids: Sequence[int]
    written: bytes | None = None


def with_token_stops(
    sampling: SamplingParams, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> SamplingParams:
    """Return sampling parameters whose stop strings are text alone.

    Args:
        sampling: as the client asks for it.
        prompts: the request's prompts; foreign tokens are dropped if all are for infilling.
        tokenizer: the served model's.
    """
    own = [
        token_id
        for stop in sampling.stop
        if (token_id := tokenizer.special_tokens.get(stop)) is not None
        and not tokenizer.token_bytes(token_id)
    ]
    kept = sampling.stop
    if all(prompt.infilling for prompt in prompts):
        known = sentinel_texts().union(tokenizer.special_tokens)
        kept = tuple(stop for stop in kept if stop not in known)
    if not own and kept == sampling.stop:
        return sampling
    ends = frozenset() if sampling.ignore_eos else _end_tokens(prompts, tokenizer)
    further = [token_id for token_id in own if token_id not in ends]
    stops = dict.fromkeys((*sampling.stop_token_ids, *further))
    return msgspec.structs.replace(sampling, stop=kept, stop_token_ids=tuple(stops))


def _end_tokens(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end the answers to all of the prompts without being asked for."""
    further = [frozenset(prompt.stop_token_ids) for prompt in prompts]
    shared = frozenset.intersection(*further) if further else frozenset()
    return shared.union(tokenizer.eos_token_ids)
