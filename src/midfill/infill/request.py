"""InfillRequest: what a client asks for, in text, whatever dialect it spoke."""

from dataclasses import dataclass
from typing import Literal

from midfill.infill.context import ContextFile

RequestedLayout = Literal["auto", "psm", "spm", "efim", "verbatim"]
WindowMode = Literal["stable", "as-sent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillRequest:
    """The text around a caret and how to lay it out.

    Attributes:
        prefix: text before the caret, or the whole prompt if it is raw.
        suffix: text after the caret.
        layout: "auto" lets the planner choose; "psm", "spm" and "efim" (the cut of the document's
            first request, kept as long as it can be) are fixed layouts, for comparison;
            "verbatim" sends ``prefix`` as it is, special tokens parsed.
        raw: ``prefix`` is a raw prompt, special tokens parsed. With layout "auto", one that is
            the model's own FIM template filled in is planned like any other request; every other
            one is sent as it is.
        document: the document's name, if the client tells; any string, only ever compared
            within one tenant. The text is the authority: a wrong name costs speed, not truth.
        tenant: whose documents to look among; tenants never see each other's.
        window: "stable" lets the planner keep the far edges of a sliding window where they were,
            with text the same tenant sent before; "as-sent" forbids it.
        context: other files or snippets to show the model; the planner orders them.
        path, repository: the document's path and its repository's name, shown to the model in
            the family's own format when there is one.
    """

    prefix: str
    suffix: str = ""
    layout: RequestedLayout = "auto"
    raw: bool = False
    document: str | None = None
    tenant: str = ""
    window: WindowMode = "stable"
    context: tuple[ContextFile, ...] = ()
    path: str = ""
    repository: str = ""
