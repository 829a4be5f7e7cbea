"""InfillRequest: what a client asks for, as text, independent of the API's dialect."""

from dataclasses import dataclass
from typing import Literal

from midfill.infill.context_files import ContextFile
from midfill.infill.window import WindowRule

RequestedLayout = Literal["auto", "psm", "spm", "efim", "verbatim"]
WindowMode = Literal["stable", "as-sent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillRequest:
    """The text around a caret, and how to lay it out.

    Attributes:
        prefix: text before the caret, or the whole raw prompt.
        suffix: text after the caret.
        layout: "auto" lets the planner choose. "psm", "spm" and "efim" (which keeps the cut of the
            document's first request as long as possible) are fixed layouts for comparison.
            "verbatim" sends ``prefix`` as it is, with special tokens parsed.
        raw: whether ``prefix`` is a raw prompt, with special tokens parsed. Unless its layout is
            "verbatim", a filled-in FIM template of any family is planned like any other request.
            Every other raw prompt is sent as it is.
        document: the document's name if the client gives one; any string, only compared within one
            tenant. The text decides: a wrong name costs speed, never correctness.
        tenant: whose documents to search; tenants never share documents.
        window: how much of a long text to show the model. "stable" takes the planner's own rule; a
            rule takes its place. Edges stay where they were while the caret is near, also with
            text that the same tenant sent before. "as-sent" shows exactly what was sent.
        context_files: other files to show the model; the planner orders them.
        snippets: whether the files are what the client's program has chosen by itself: hints, of
            which as much is shown as the model profits from, and which may be shown later or not
            at all, see ``context_files``. Otherwise all of it is shown now, or the request refused.
        context_characters: at most so many characters of the files are shown, the last ones;
            None leaves that to the planner if they are snippets.
        open_line: answer a caret at the start of a line that has text as on an empty line above it,
            see ``opened_line_break``; None does what the model needs.
        path: the document's path, shown to the model in the family's own format if it has one.
        repository: its repository's name, shown likewise.
        template: the first sentinel that ``template.read_template`` has found in a raw prompt; None
            if it was no template.
        bos: a BOS token to keep, found in the same way.
    """

    prefix: str
    suffix: str = ""
    layout: RequestedLayout = "auto"
    raw: bool = False
    document: str | None = None
    tenant: str = ""
    window: WindowMode | WindowRule = "stable"
    context_files: tuple[ContextFile, ...] = ()
    snippets: bool = False
    context_characters: int | None = None
    open_line: bool | None = None
    path: str = ""
    repository: str = ""
    template: str | None = None
    bos: str = ""
