"""PromptEncoder: turns what clients send into token ids: texts, ids, a caret's text, a chat.

``ContextLimit`` refuses what is too long for the model's context, and what is empty.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midfill.config import DEFAULT_DOCUMENT_MEMORY
from midfill.errors import InvalidRequestError, OptionError
from midfill.frontend.answer_format import find_answer_format
from midfill.frontend.chat import chat_template_of, count_characters
from midfill.frontend.prompt import LayoutReport, Message, Prompt, PromptAnswer, PromptSource
from midfill.frontend.token_report import TokenReport, TokenReporter
from midfill.infill.answer_history import GivenAnswer
from midfill.infill.context_files import ContextFile, FittingFiles, shown_text
from midfill.infill.document_store import Memory
from midfill.infill.formats import FimFormat, custom_format, find_format
from midfill.infill.layout import PromptLayout, TextSegment
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest
from midfill.infill.template import read_template
from midfill.infill.window import WindowRule
from midfill.models.checkpoints.checkpoint import (
    FRAGMENTS_KEY,
    RAW_BOS_KEY,
    SNIPPETS_KEY,
    Checkpoint,
    DescribedModel,
)
from midfill.models.checkpoints.model_record import (
    confidence_rule_of,
    cut_rule_of,
    empty_threshold_of,
    end_bias_of,
    opens_lines_of,
    raw_bos_of,
    snippet_characters_of,
    window_rule_of,
)
from midfill.models.tokens.layout_encoder import LayoutEncoder, count_file_tokens
from midfill.models.tokens.tokenizer import keeps_tokens_of

# A low estimate, so that text remembered from earlier requests does not fill the context.
_CHARACTERS_PER_TOKEN = 2

# No window is longer than a context of such tokens: it would be tokenised in vain.
_MAX_CHARACTERS_PER_TOKEN = 8

_ANSWER_SHARE = 0.125  # of the context; a window leaves as much for the answer

_WINDOW_SHARE = 0.85  # of the context; what a window may hold after one was too long

_MAX_SHRINKS = 16

_TOO_LONG = "context_length_exceeded"


Admit = Callable[[str | None], None]
"""Raises an error for a document that may not be asked about now: its id, as the planner gives it
in ``Planner.find_document``."""


class PromptEncoder:
    """Makes prompts for one model. It remembers documents, and is not thread-safe.

    Args:
        checkpoint: its tokenizer, chat template and metadata are used.
        format: the model's FIM format, or None.
        context: maximum number of tokens of a prompt and its answer.
        window: how much of a long document to show the model; None takes what the checkpoint says.
        snippet_characters: how much to show of the snippets that plugins send by themselves; None
            takes what the checkpoint says.
        document_memory: see ``ServeOptions``.
        remembers: whether a prompt may depend on those before it. Otherwise each request of
            ``encode_all`` is encoded as the first one.

    Attributes:
        context, format: the same.
        window: the rule for requests that bring none.
        snippet_characters: likewise.
        raw_bos: the token that raw prompts begin with, or None.
        answer_format: of answers to chats; None if all of them is content.
    """

    def __init__(
        self,
        checkpoint: DescribedModel,
        format: FimFormat | None,
        context: int,
        window: WindowRule | None = None,
        snippet_characters: int | None = None,
        document_memory: int = DEFAULT_DOCUMENT_MEMORY,
        *,
        remembers: bool = True,
    ) -> None:
        self.context = context
        self._remembers = remembers
        self.format = format
        self.window = self._limited(window or window_rule_of(checkpoint))
        if snippet_characters is None:
            snippet_characters = snippet_characters_of(checkpoint)
        self.snippet_characters = snippet_characters
        self._end_bias = end_bias_of(checkpoint)
        self._empty_threshold = empty_threshold_of(checkpoint)
        self.confidence_rule = confidence_rule_of(checkpoint)
        self._tokenizer = checkpoint.tokenizer
        self._planner_options = PlannerOptions(
            max_prompt_characters=context * _CHARACTERS_PER_TOKEN,
            max_document_bytes=document_memory,
            max_context_bytes=document_memory // 8,
            fragments=checkpoint.metadata.get(FRAGMENTS_KEY) is True,
            cut_rule=cut_rule_of(checkpoint),
            keeps_tokens=keeps_tokens_of(checkpoint.tokenizer),
            window=self.window,
            snippet_characters=snippet_characters,
            opens_lines=opens_lines_of(checkpoint),
        )
        self._planner = Planner(format, self._planner_options)
        self.raw_bos = raw_bos_of(checkpoint)
        self._layouts = LayoutEncoder(
            checkpoint.tokenizer, max_bytes=document_memory // 4, raw_bos=self.raw_bos
        )
        self._reporter = TokenReporter(checkpoint.tokenizer, self._layouts, format)
        self._chat = chat_template_of(checkpoint.tokenizer)
        self.answer_format = find_answer_format(checkpoint.tokenizer)
        self._limit = ContextLimit(context, checkpoint.tokenizer.longest_token())
        self._fitting = FittingFiles(context, self._count_shown)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat is not None

    @property
    def template_names(self) -> frozenset[str]:
        """Names that the chat template reads, such as ``tools``; none without a template."""
        return frozenset() if self._chat is None else self._chat.names

    def memory(self) -> dict[str, Memory]:
        """Return what is remembered, by kind. May be called on any thread."""
        tokens = Memory(self._layouts.held_bytes, self._layouts.max_bytes)
        return {**self._planner.memory(), "tokens": tokens}

    def encode_all(self, sources: Sequence[PromptSource], admit: Admit | None) -> list[Prompt]:
        """Return the prompts of a request; see ``encode``."""
        if not self._remembers:
            self._planner = Planner(self.format, self._planner_options)
            self._fitting = FittingFiles(self.context, self._count_shown)
        return [self.encode(source, admit) for source in sources]

    def encode(self, source: PromptSource, admit: Admit | None = None) -> Prompt:
        """Return the prompt that a client asks for.

        Args:
            source: what it is made of.
            admit: see ``infill``.

        Raises:
            InvalidRequestError: see ``infill``, ``tokens`` and ``chat``.
            MidfillError: ``admit`` refuses the document.
        """
        try:
            if source.text is not None:
                prompt = self.infill(
                    source.text,
                    healing=source.healing,
                    stop_token_ids=source.stop_token_ids,
                    admit=admit,
                )
                if source.messages is not None and prompt.is_verbatim and self.has_chat_template:
                    prompt = self.chat(source.messages, source.tenant, source.template_fields)
            elif source.token_ids is not None:
                prompt = self.tokens(source.token_ids)
            else:
                messages = source.messages or ()
                prompt = self.chat(messages, source.tenant, source.template_fields)
            if source.prediction:
                self._limit.check_characters(len(source.prediction), "prediction")
                prompt = self._with_prediction(prompt, source.prediction)
            return prompt.with_empty_threshold(source.empty_threshold).with_method(source.method)
        except InvalidRequestError as error:
            raise error.renamed(source.field_names) from None

    def infill(
        self,
        request: InfillRequest,
        *,
        healing: bool = True,
        stop_token_ids: Collection[int] = (),
        admit: Admit | None = None,
    ) -> Prompt:
        """Return the prompt for the text around a caret, or for a raw text (``request.raw``).

        Args:
            request: the text and how to lay it out.
            healing: let the model write an unfinished last word again, see
                ``models.tokens.healing``. No effect on a raw prompt that is sent as it is.
            stop_token_ids: tokens that end the answer at the client's wish. The answer can't write
                one of them again, so a prompt whose last tokens hold one is not healed.
            admit: called with the text's document before it is planned and tokenised.

        Raises:
            InvalidRequestError: the prompt is too long or empty, or the layout doesn't fit it.
            MidfillError: ``admit`` refuses the document.
        """
        sent = request
        request = read_template(request, self.format)
        if admit is not None:
            admit(self._planner.find_document(request))
        if request.snippets:
            request = self._with_fitting(request)
        self._limit.check_characters(
            sum(len(file.path) + len(file.text) for file in request.context_files), "context"
        )
        self._limit.check_characters(len(request.path) + len(request.repository), "path")
        if request.raw or request.window == "as-sent":
            self._limit.check_characters(len(request.prefix) + len(request.suffix))
        elif isinstance(request.window, WindowRule):
            request = dataclasses.replace(request, window=self._limited(request.window))
        layout, parts = self._lay_out(request)
        if layout.layout == "verbatim" and sent.layout not in ("auto", "verbatim"):
            raise InvalidRequestError(
                f"midfill.layout {sent.layout!r} needs a suffix, or a prompt that is a"
                " FIM template filled in",
                param="midfill.layout",
            )
        suffix = layout.line_break + request.suffix
        prompt, last = self._encode(layout, parts, request.prefix, suffix)
        infilling = layout.layout != "verbatim"
        prompt = dataclasses.replace(
            prompt, text=sent.prefix, infilling=infilling, line_break=layout.line_break
        )
        if healing:
            prompt = self._heal(prompt, last, stop_token_ids)
        return self._predict(prompt)

    def encode_layout(
        self,
        layout: PromptLayout,
        *,
        healing: bool = True,
        stop_token_ids: Collection[int] = (),
    ) -> Prompt:
        """Return the prompt for a layout of the caller's own; arguments as in ``infill``.

        Raises:
            InvalidRequestError: the prompt is too long or empty.
        """
        parts = self._layouts.encode_parts(layout)
        prompt, last = self._encode(layout, parts, layout.planned_prefix, layout.planned_suffix)
        return self._heal(prompt, last, stop_token_ids) if healing else prompt

    def _lay_out(self, request: InfillRequest) -> tuple[PromptLayout, list[Sequence[int]]]:
        """Lay a request out and encode it, with a smaller window as long as it is too long.

        Returns:
            The layout and the ids of its parts, as of ``LayoutEncoder.encode_parts``.
        """
        limit = None
        for _ in range(_MAX_SHRINKS):
            layout = self._planner.plan_and_record(request, limit)
            parts = self._layouts.encode_parts(layout)
            file_tokens = count_file_tokens(layout, parts)
            tokens = sum(map(len, parts)) - file_tokens
            room = self.context - (file_tokens if request.snippets else 0)
            most = room - int(_ANSWER_SHARE * room)
            if tokens < most or layout.layout == "verbatim" or request.window == "as-sent":
                break
            shown = len(layout.planned_prefix) + len(layout.planned_suffix)
            limit = int(shown * _WINDOW_SHARE * room / tokens)
        return layout, parts

    def _count_shown(self, file: ContextFile) -> int:
        """Return the tokens of another file in a prompt; far too long ones are not tokenised."""
        if self.format is None:
            return 0
        text = shown_text(self.format, file)
        if len(text) > self._limit.max_characters:
            return self.context
        return self._layouts.count(text) + 1  # its separator

    def _limited(self, rule: WindowRule) -> WindowRule:
        """Return the rule without text that can't fit into the context."""
        most = self.context * _MAX_CHARACTERS_PER_TOKEN
        return WindowRule(min(rule.before, most), min(rule.after, most))

    def _encode(
        self, layout: PromptLayout, parts: Sequence[Sequence[int]], prefix: str, suffix: str
    ) -> tuple[Prompt, int]:
        """Return a layout's prompt, and how many tokens at its end the answer continues."""
        ids = [token_id for part in parts for token_id in part]
        self._limit.check_layout(layout, parts)
        raw = layout.layout == "verbatim"
        report = LayoutReport(
            layout=layout.layout,
            cut=None if raw else layout.cut,
            sentinels=self.format is not None,
            document=layout.document,
            window=None if raw else (len(layout.planned_prefix), len(layout.planned_suffix)),
            template=layout.template,
        )
        prompt = Prompt(
            ids,
            prefix,
            report,
            layout.stop_token_ids,
            0.0 if raw else self._end_bias,
            0.0 if raw else self._empty_threshold,
            prefix=prefix,
            suffix=suffix,
            layout=layout,
            parts=tuple(parts),
            contexts=self._layouts.file_bounds(layout, parts, self.format),
            confidence_rule=None if raw else self.confidence_rule,
        )
        end = layout.segments[-1] if layout.segments else None
        is_open = isinstance(end, TextSegment) and end.role in ("prefix", "increment")
        return prompt, len(parts[-1]) if is_open else 0

    def _heal(self, prompt: Prompt, last: int, stop_token_ids: Collection[int]) -> Prompt:
        """Return the prompt without those of its ``last`` tokens that a longer token could replace.

        Its first token always stays, since the engine can't start from an empty prompt.
        """
        if not last:
            return prompt
        ids = prompt.token_ids
        healing = self._tokenizer.back_off(ids, max(1, len(ids) - last))
        kept = len(ids) - healing.removed
        if not set(stop_token_ids).isdisjoint(ids[kept:]):
            return prompt
        report = prompt.report and dataclasses.replace(prompt.report, healed=len(healing.required))
        return dataclasses.replace(
            prompt, token_ids=ids[:kept], begins_with=healing.required, report=report
        )

    def _predict(self, prompt: Prompt) -> Prompt:
        """Return the prompt with what earlier answers in its document say of its own."""
        answer = self._planner.predicted_answer(prompt.document, prompt.prefix)
        if answer is None:
            return prompt
        return self._with_prediction(prompt, answer.text, answer.end_token)

    def _with_prediction(self, prompt: Prompt, text: str, end_token: int | None = None) -> Prompt:
        """Return the prompt with a text that its answer will probably be.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        try:
            written = prompt.begins_with.decode() + text
        except UnicodeDecodeError:  # a character is to be completed
            return prompt
        ids = self._tokenizer.encode_continuation(written)[: self.context]
        end = () if end_token is None else (end_token,)
        return dataclasses.replace(prompt, prediction=(*ids, *end))

    def record_answers(self, answered: Iterable[PromptAnswer]) -> None:
        """Record the answers to prompts of documents, for what they say of the next ones."""
        for prompt, token_ids, written in answered:
            if not prompt.document or not token_ids:
                continue
            end_token = None
            if written is None:
                pieces = list(map(self._tokenizer.token_bytes, token_ids))
                written, end_token = b"".join(pieces), None if pieces[-1] else token_ids[-1]
            healed = prompt.begins_with
            if written.startswith(healed):
                text = written[len(healed) :].decode(errors="ignore")
                given = GivenAnswer.at(prompt.prefix, text, end_token)
                self._planner.record_answer(prompt.document, given)

    def expected_prompt(self, document: str) -> Prompt | None:
        """Return the prompt to compute in idle time after a document's last one, if any.

        Args:
            document: ``LayoutReport.document``.
        """
        return self._expected(self._planner.expected_layout(document))

    def expected_with_snippets(self, request: InfillRequest) -> Prompt | None:
        """Return the prompt to compute in idle time when a client announces other snippets, if any.

        Args:
            request: its tenant and its snippets count; its texts are empty.
        """
        return self._expected(self._planner.expected_with_snippets(self._with_fitting(request)))

    def _with_fitting(self, request: InfillRequest) -> InfillRequest:
        """Return the request with as many of its snippets as are shown and fit."""
        files = self._planner.newest_files(request)
        files = self._fitting.choose_and_record(files, request.tenant)
        return dataclasses.replace(request, context_files=files)

    def _expected(self, layout: PromptLayout | None) -> Prompt | None:
        parts = [] if layout is None else self._layouts.encode_parts(layout)
        ids = [token_id for part in parts for token_id in part]
        if not 0 < len(ids) < self.context:
            return None
        return Prompt(ids, "", layout=layout, parts=tuple(parts))

    def record_computed(self, expected: Prompt) -> None:
        """Record that an expected prompt is in the engine's cache now."""
        assert expected.layout is not None
        self._planner.record_computed(expected.layout)

    def report_all(self, prompts: Sequence[Prompt], tenant: str) -> list[TokenReport | None]:
        """Return what ``report_tokens`` does of each prompt."""
        return [self.report_tokens(prompt, tenant) for prompt in prompts]

    def report_tokens(self, prompt: Prompt, tenant: str = "") -> TokenReport | None:
        """Return a prompt's tokens and what it would cost in PSM order; None if it has no layout.

        Args:
            prompt: a prompt of this encoder that is about to be computed.
            tenant: whose earlier prompts count as cached.
        """
        if prompt.layout is None:
            return None
        return self._reporter.report(prompt.layout, prompt.parts, len(prompt.token_ids), tenant)

    def raw(self, text: str) -> Prompt:
        """Return the prompt for a raw text; special tokens in it are parsed.

        Raises:
            InvalidRequestError: the text is too long or empty.
        """
        return self.infill(InfillRequest(prefix=text, raw=True))

    def tokens(self, token_ids: Sequence[int]) -> Prompt:
        """Return the prompt for token ids, which are sent as they are.

        Raises:
            InvalidRequestError: there are too many or none, or the model doesn't have one of them.
        """
        self._limit.check_tokens(len(token_ids))
        self._tokenizer.check_ids(token_ids)
        text = self._tokenizer.decode(token_ids)
        return Prompt(list(token_ids), text, prefix=text)

    def chat(
        self,
        messages: Sequence[Message],
        tenant: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt for a tenant's conversation; see ``ChatTemplate.render``.

        Raises:
            InvalidRequestError: the model has no chat template, the template is broken or refuses
                the messages, or they are too long.
        """
        if self._chat is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )

        def check(characters: int) -> None:
            self._limit.check_characters(characters, "messages")

        check(count_characters([*messages, fields]))
        ids = self._chat.encode(messages, tenant, check, fields)
        self._limit.check_tokens(len(ids), "messages")
        format, tools = self.answer_format, (fields or {}).get("tools", ())
        return Prompt(ids, "", channels=None if format is None else format.channels(ids, tools))


def fim_format(
    checkpoint: Checkpoint, fim_tokens: tuple[str, str, str] | None = None
) -> FimFormat | None:
    """Return a checkpoint's FIM format, or None if it has no sentinels that midfill knows.

    Args:
        checkpoint: the model.
        fim_tokens: the prefix, suffix and middle token, if the user names them.

    Raises:
        OptionError: a named token is not one of the model's special tokens.
    """
    special_tokens = checkpoint.tokenizer.special_tokens
    if fim_tokens is not None:
        try:
            return custom_format(*fim_tokens, special_tokens)
        except InvalidRequestError as error:
            raise OptionError(f"--fim-tokens: {error}") from None
    return find_format(checkpoint.config.family, special_tokens, checkpoint.metadata)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Return a digest of what decides a model's answers: its weights, and its rules of layout."""
    rules = (cut_rule_of(checkpoint), window_rule_of(checkpoint), end_bias_of(checkpoint))
    text = f"{checkpoint.fingerprint} {rules} {checkpoint.metadata.get(FRAGMENTS_KEY) is True}"
    if threshold := empty_threshold_of(checkpoint):  # off, it leaves earlier digests valid
        text += f" {threshold}"
    if opens_lines_of(checkpoint):
        text += " opens lines"
    if SNIPPETS_KEY in checkpoint.metadata:
        text += f" snippets {snippet_characters_of(checkpoint)}"
    if RAW_BOS_KEY in checkpoint.metadata:
        text += f" raw prompts after {raw_bos_of(checkpoint)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Checks the lengths of what clients send.

    Attributes:
        context: maximum number of tokens of a prompt and its answer.
        longest_token: characters of the longest token.
    """

    context: int
    longest_token: int

    @property
    def max_characters(self) -> int:
        """No longer text fits, however few tokens it has."""
        return self.context * self.longest_token

    def check_characters(self, characters: int, field: str = "prompt") -> None:
        """Refuse a text that can't fit, before time is spent on tokenising it.

        Raises:
            InvalidRequestError: it can't fit.
        """
        if characters > self.max_characters:
            raise InvalidRequestError.of_field(
                field,
                f"has {characters} characters; the context is {self.context} tokens",
                code=_TOO_LONG,
            )

    def check_tokens(self, count: int, field: str = "prompt") -> None:
        """Refuse a prompt that is empty or leaves no room for an answer.

        Raises:
            InvalidRequestError: it is, or does.
        """
        if count == 0:
            raise InvalidRequestError.of_field(field, "is empty")
        if count >= self.context:
            has = "and prompt together have" if field == "context" else "has"
            raise InvalidRequestError.of_field(
                field,
                f"{has} {count} tokens; the context of {self.context} tokens leaves no room for"
                " an answer",
                code=_TOO_LONG,
            )

    def check_layout(self, layout: PromptLayout, parts: Sequence[Sequence[int]]) -> None:
        """Do the same for a laid-out prompt, naming "context" if it would fit without other files.

        Args:
            layout: the layout.
            parts: the ids of its parts, as of ``LayoutEncoder.encode_parts``.
        """
        tokens, extra = sum(map(len, parts)), count_file_tokens(layout, parts)
        too_long = "context" if extra and tokens - extra < self.context else "prompt"
        self.check_tokens(tokens, too_long)
