"""Publish a benchmark's figures on the terminal, as JSON and as a section of a document."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType

from midfill.system.files import write_file
from midfill.system.reporting.document_sections import replace_section

_WIDTH = 130
"""Columns of what is not a terminal: enough for the tables."""


def publish(
    report: object,
    drawn: RenderableType,
    markdown: str,
    *,
    section: str,
    json: Path | None,
    docs: Path | None,
) -> None:
    """Print a report, and write it to files.

    Args:
        report: all figures, of types that msgspec encodes.
        drawn: their form on the terminal.
        markdown: their form in a document.
        section: the document's section, see ``replace_section``.
        json, docs: files to write; None writes none.
    """
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH)).print(drawn)
    if json is not None:
        write_json(json, report)
    if docs is not None:
        replace_section(docs, section, markdown)


def saver(json: Path | None) -> Callable[[object], None]:
    """Return what writes a report so far into a file; None writes it nowhere."""
    return lambda report: None if json is None else write_json(json, report)


def write_json(path: Path, report: object) -> None:
    """Write all figures of a report; the file is replaced as a whole.

    Raises:
        MidfillError: it can't be written.
    """
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
