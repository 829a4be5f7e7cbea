"""Planner: turns infill requests into prompt layouts that keep the prefix cache valid.

Unlike scheduling policies, a planner has state. Methods that change it are named ``record_...`` or
``..._and_record``.

Carets at the start of a line that has text are answered as on an empty line above it, see
``opened_line_break``.
"""

from dataclasses import dataclass, replace

from midfill.config import DEFAULT_DOCUMENT_MEMORY
from midfill.errors import InvalidRequestError
from midfill.infill.answer_history import MAX_ANSWERS, GivenAnswer, predicted_answer
from midfill.infill.context_files import DEFAULT_SNIPPET_CHARACTERS, Snippets
from midfill.infill.context_planner import ContextPlanner
from midfill.infill.cut_places import KeepsTokens, keeps_any_tokens
from midfill.infill.document_store import Document, DocumentStore, Memory
from midfill.infill.formats import FimFormat
from midfill.infill.layout import PromptLayout, Segment, TextSegment, lay_out
from midfill.infill.prefix_cut import (
    DEFAULT_RULE,
    CachedPrompt,
    CutHistory,
    CutRule,
    first_cut,
)
from midfill.infill.request import InfillRequest
from midfill.infill.template import read_template
from midfill.infill.view import View, updated_view
from midfill.infill.window import ShownText, WindowRule


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """Limits of a planner, and what its model can do.

    Attributes:
        max_characters: maximum length of a prefix, suffix, raw prompt or context.
        max_prompt_characters: how far remembered text may lengthen a prompt (an estimate of the
            model's context; what the client sent is never cut).
        max_document_bytes: memory for remembered documents over all tenants.
        max_context_bytes: the same for the files and snippets that prompts begin with.
        fragments: whether the model was trained on text tokenised in fragments (EFIM). If so, every
            increment is tokenised as it was typed, and no cached token is lost. Other models get
            each increment as one text.
        cut_rule: what the model needs of its cuts.
        keeps_tokens: where its tokenizer allows a cut.
        window: how much of a long text to show the model; None shows all that is sent.
        snippet_characters: how much to show of the snippets that plugins send by themselves.
        opens_lines: answer carets at the start of a line that has text as on an empty line above
            it, see ``opened_line_break``.
    """

    max_characters: int = 4_000_000
    max_prompt_characters: int = 4_000_000
    max_document_bytes: int = DEFAULT_DOCUMENT_MEMORY
    max_context_bytes: int = DEFAULT_DOCUMENT_MEMORY // 8
    fragments: bool = False
    cut_rule: CutRule = DEFAULT_RULE
    keeps_tokens: KeepsTokens = keeps_any_tokens
    window: WindowRule | None = None
    snippet_characters: int = DEFAULT_SNIPPET_CHARACTERS
    opens_lines: bool = False


class Planner:
    """Lays out the prompts of one model. It remembers documents and never touches the engine.

    Not thread-safe. Planning takes well under a millisecond.

    Args:
        format: the model's FIM format; None for a model without sentinels.
        options: limits; None takes the defaults.
    """

    def __init__(self, format: FimFormat | None, options: PlannerOptions | None = None) -> None:
        self._format = format
        self._options = options or PlannerOptions()
        self._documents = DocumentStore(self._options.max_document_bytes)
        self._contexts = ContextPlanner(
            format, self._options.snippet_characters, self._options.max_context_bytes
        )

    def memory(self) -> dict[str, Memory]:
        """Return what documents and contexts take."""
        documents = self._documents
        return {
            "documents": Memory(documents.held_bytes, documents.max_bytes),
            "contexts": self._contexts.memory(),
        }

    def plan_and_record(
        self, request: InfillRequest, window_limit: int | None = None
    ) -> PromptLayout:
        """Lay out one request, and record its text and its cut in its document.

        Args:
            request: the texts and how to lay them out.
            window_limit: maximum number of the document's characters in the prompt, given where
                more have turned out not to fit into the context. The document remembers it.

        Raises:
            InvalidRequestError: a text is too long or holds half a surrogate pair, or a suffix
                comes with a raw prompt.
        """
        self._check(request)
        request = read_template(request, self._format)
        if request.raw or request.layout == "verbatim":
            segments = (TextSegment(request.prefix, "raw"),) if request.prefix else ()
            return PromptLayout(segments=segments, layout="verbatim")
        layout = self._plan(request, window_limit)
        return replace(layout, template=request.template)

    def find_document(self, request: InfillRequest) -> str | None:
        """Return the id of the document that a request is for; None if it is for a new one.

        Changes nothing. "" stands for the request of a layout that knows no documents.
        """
        request = read_template(request, self._format)
        if request.raw or request.layout in ("verbatim", "psm", "spm"):
            return ""
        prefix, suffix = request.prefix, request.suffix
        found = self._documents.find(request.tenant, request.document, prefix, suffix)
        return None if found is None else found[0].id

    def expected_layout(self, document: str) -> PromptLayout | None:
        """Return the layout that a document's next request will probably need.

        The caller has it computed in idle time and then calls ``record_computed``. Text that
        follows an accepted completion needs none: its tokens were generated after the last prompt.

        Args:
            document: ``PromptLayout.document`` of its last prompt.

        Returns:
            The layout; None if it is cached already or the document is no longer held.
        """
        found = self._documents.get(document)
        if found is None:
            return None
        expected = self._expected_prompt(found)
        prompt = expected or self._cut_anew(found)
        context_segments = None if prompt is None else self._contexts.prepare(found, prompt)
        if prompt is None or (expected is None and context_segments is None):
            return None
        return self._laid_out(
            prompt,
            found.id,
            found.context_segments if context_segments is None else context_segments,
        )

    def _expected_prompt(self, found: Document) -> CachedPrompt | None:
        """Return the prompt that a document will need soon, None if its last one will do."""
        if (shown := found.windows.expected(found.view)) is not None:
            prefix, suffix, cut = shown.prefix, shown.suffix, len(shown.prefix)
            if self._cuts_matter:
                options = self._options
                cut = first_cut(prefix, options.cut_rule, options.keeps_tokens)
        elif self._cuts_matter and (better := found.cuts.better_cut()) is not None:
            last = found.cuts.prompts[-1]
            prefix, suffix, cut = last.prefix, last.suffix, better
        else:
            return None
        return CachedPrompt.cut_at(cut, prefix, suffix)

    def _cut_anew(self, found: Document) -> CachedPrompt | None:
        """Return a document's last prompt, cut as if it were the first; None if there is none."""
        if not found.cuts.prompts:
            return None
        last, options = found.cuts.prompts[-1], self._options
        cut = first_cut(last.prefix, options.cut_rule, options.keeps_tokens)
        return CachedPrompt.cut_at(cut, last.prefix, last.suffix)

    def expected_with_snippets(self, request: InfillRequest) -> PromptLayout | None:
        """Return the layout that a tenant will probably need next, now that other snippets come.

        It is that of the last document with these if they are worth their price, or of the snippets
        alone if there is no document.

        Args:
            request: its tenant and its snippets count; its texts are empty.

        Returns:
            The layout; None if the last one will do.

        Raises:
            InvalidRequestError: see ``plan_and_record``.
        """
        self._check(request)
        offered = self._contexts.newest(request)
        found = self._documents.last(request.tenant)
        if found is not None:
            found.snippets.offered = offered
            self._documents.record(found)
            return self.expected_layout(found.id)
        context_segments = self._contexts.prepare_alone(request.tenant, offered)
        return (
            None
            if context_segments is None
            else self._laid_out(CachedPrompt("", ""), None, context_segments)
        )

    def newest_files(self, request: InfillRequest) -> Snippets:
        """Return as much of a request's other files as may be shown of them."""
        return self._contexts.newest(request)

    def record_computed(self, layout: PromptLayout) -> None:
        """Record that an expected layout is in the engine's cache now."""
        found = self._documents.get(layout.document) if layout.document is not None else None
        if found is not None:
            prefix = layout.planned_prefix
            self._contexts.record_computed(found, layout)
            self._record_context_segments(found, layout.context_segments)
            found.cuts.record_prompt(prefix, layout.planned_suffix, layout.cut)
            found.windows.record_computed(found.view, prefix)
            self._documents.record(found)

    def predicted_answer(self, document: str, prefix: str) -> GivenAnswer | None:
        """Return what a document's last answers say of the one after ``prefix``; None: nothing.

        Args:
            document: ``PromptLayout.document`` of the prompt.
            prefix: the text before the caret, as the client sent it.
        """
        found = self._documents.get(document)
        return None if found is None else predicted_answer(found.answers, prefix)

    def record_answer(self, document: str, answer: GivenAnswer) -> None:
        """Record the answer to a document's prompt, as far as it was generated."""
        found = self._documents.get(document)
        if found is not None and answer.text:
            others = (each for each in found.answers if each != answer)
            found.answers = (answer, *others)[:MAX_ANSWERS]
            self._documents.measure(found)

    @property
    def _cuts_matter(self) -> bool:
        return self._format is not None and self._format.order == "psm"

    def _plan(self, request: InfillRequest, window_limit: int | None) -> PromptLayout:
        """Lay out a caret's prompt, its line opened where that helps."""
        opens = self._options.opens_lines if request.open_line is None else request.open_line
        line_break = ""
        if opens and self._format is not None:
            line_break = opened_line_break(request.prefix, request.suffix)
        if line_break:
            request = replace(request, suffix=line_break + request.suffix)
        layout = self._plan_around(request, window_limit)
        return replace(layout, line_break=line_break) if line_break else layout

    def _plan_around(self, request: InfillRequest, window_limit: int | None) -> PromptLayout:
        rule = self._window_rule(request)
        if request.layout in ("psm", "spm"):
            prefix, suffix = request.prefix, request.suffix
            if rule is not None:
                text, caret = prefix + suffix, len(prefix)
                rule = rule if window_limit is None else rule.limited(window_limit)
                start, end = rule.place(text, caret)
                prefix, suffix = text[start:caret], text[caret:end]
            context_segments = self._contexts.order_and_record(request)
            cut = len(prefix) if request.layout == "psm" else 0
            return self._laid_out(CachedPrompt.cut_at(cut, prefix, suffix), None, context_segments)
        document = self._record_text(request)
        shown = self._show(document, rule, window_limit)
        prefix, suffix = shown.prefix, shown.suffix
        context_segments = self._contexts.choose_and_record(document, request, shown)
        self._record_context_segments(document, context_segments)
        if request.layout == "efim":
            head = document.fixed_head
            if head is None or not prefix.startswith(head):
                head = document.fixed_head = prefix
            prompt = CachedPrompt.cut_at(len(head), prefix, suffix)
        elif self._cuts_matter:
            prompt = document.cuts.choose_and_record(prefix, suffix)
        else:
            if self._format is not None:  # the suffix comes first
                document.cuts.record_prompt(prefix, suffix, cut=0)
            prompt = CachedPrompt(prefix, suffix)
        self._documents.record(document)
        return self._laid_out(prompt, document.id, context_segments)

    def _window_rule(self, request: InfillRequest) -> WindowRule | None:
        """Return how much of the request's text to show; None shows all of it."""
        if request.window == "as-sent":
            return None
        return self._options.window if request.window == "stable" else request.window

    def _show(self, document: Document, rule: WindowRule | None, limit: int | None) -> ShownText:
        """Return the text around the caret that goes into the prompt, and record its window."""
        if rule is None:
            return ShownText(document.view.prefix, document.view.suffix)
        shown = document.windows.choose_and_record(document.view, rule, limit)
        if not shown.same_start:
            document.cuts.restart_visit()
        return shown

    def _record_text(self, request: InfillRequest) -> Document:
        """Return the request's document, its name and view updated."""
        prefix, suffix = request.prefix, request.suffix
        found = self._documents.find(request.tenant, request.document, prefix, suffix)
        if found is None:
            view = View.of(prefix, suffix)
            cuts = CutHistory(self._options.cut_rule, self._options.keeps_tokens)
            return self._documents.create(request.tenant, request.document, view, cuts)
        document, at = found
        if request.document is not None:
            document.name = request.document
        if request.layout == "efim" or request.window == "as-sent":
            document.view = View.of(prefix, suffix)
        else:
            limit = self._options.max_prompt_characters
            document.view = updated_view(document.view, at, prefix, suffix, max_characters=limit)
        return document

    def _record_context_segments(
        self, document: Document, context_segments: tuple[Segment, ...]
    ) -> None:
        """Record what a document's prompt begins with; nothing cached begins with another one."""
        if document.context_segments != context_segments:
            document.context_segments = context_segments
            document.cuts.prompts.clear()

    def _laid_out(
        self, prompt: CachedPrompt, document: str | None, context_segments: tuple[Segment, ...]
    ) -> PromptLayout:
        prefix, cut = prompt.prefix, len(prompt.head)
        if self._format is None:
            only = (TextSegment(prefix, "prefix"),) if prefix else ()
            return PromptLayout(
                segments=only, layout="prefix-only", cut=len(prefix), document=document
            )
        segments, name = lay_out(
            self._format,
            prefix,
            prompt.suffix,
            cut,
            fragments=prompt.fragments if self._options.fragments else None,
            context_segments=context_segments,
        )
        return PromptLayout(
            segments=segments,
            layout=name,
            cut=len(prefix) if self._format.order == "spm" else cut,
            document=document,
            stop_token_ids=self._format.stop_token_ids,
            context_segments=context_segments,
        )

    def _check(self, request: InfillRequest) -> None:
        if request.suffix and (request.raw or request.layout == "verbatim"):
            raise InvalidRequestError(
                "a raw prompt (layout 'verbatim') is sent as it is and takes no suffix",
                param="suffix",
            )
        self._check_text(request.prefix, "prompt")
        self._check_text(request.suffix, "suffix")
        self._check_text(
            "\n".join(file.path + file.text for file in request.context_files), "context"
        )
        self._check_text(request.path + request.repository, "path")

    def _check_text(self, text: str, field: str) -> None:
        if len(text) > self._options.max_characters:
            raise InvalidRequestError.of_field(
                field,
                f"has {len(text)} characters; at most {self._options.max_characters} are accepted",
            )
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError.of_field(
                    field,
                    f"holds half a surrogate pair at character {error.start}; "
                    "send whole Unicode characters",
                ) from None


def opened_line_break(prefix: str, suffix: str) -> str:
    """Return the line break that the suffix gets, and the answer ends with; "" if none is needed.

    What is missing at the start of a line that has text is whole lines, and the text that fills
    them ends with a line break. A model does not end its answers there: many tokenizers join a line
    break and the indentation that follows into one token, so after a line's last word the likely
    token is one that goes on. Where the suffix begins with the line break, the answer simply ends
    before it. So the model is shown a suffix with a line break in front, and the answer gets that
    break at its end. An answer of nothing stays nothing.

    Measured with the default model on 200 single-line holes of HumanEval-Infilling: the whole
    answer passes in 29.0% instead of 15.5%, and 90% instead of 42% of answers end by themselves.

    Args:
        prefix, suffix: the text before and after the caret.

    Returns:
        The document's line break where the caret is at the start of a line that has text.
    """
    rest = suffix.partition("\n")[0]
    if not rest.strip() or (prefix and prefix[-1] != "\n"):
        return ""
    before = prefix[-2:] if prefix else suffix[: suffix.find("\n") + 1][-2:]
    return "\r\n" if before == "\r\n" else "\n"
