"""publish: a benchmark's figures on the terminal, as JSON and as a section of a document."""

from pathlib import Path

import msgspec
from rich.console import Console, RenderableType

from midfill.reporting.document_sections import replace_section
from midfill.system.atomic import write_file


def publish(
    report: object,
    drawn: RenderableType,
    markdown: str,
    *,
    section: str,
    json: Path | None,
    docs: Path | None,
) -> None:
    """Show a report, and write it where that is wanted.

    Args:
        report: all figures, as msgspec can encode them.
        drawn: what the terminal shows of them.
        markdown: what a document says of them.
        section: where in the document, see ``replace_section``.
        json, docs: files to write; None writes none.
    """
    Console().print(drawn)
    if json is not None:
        write_json(json, report)
    if docs is not None:
        replace_section(docs, section, markdown)


def write_json(path: Path, report: object) -> None:
    """Write all figures of a report; the file is replaced as a whole.

    Raises:
        MidfillError: it can't be written.
    """
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
