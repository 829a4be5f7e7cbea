"""Tables of benchmarks: printed, and written into the documents that show them."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group

from midfill_lab import reporting
from midfill_lab.reporting import ResultTable, replace_section


def publish(
    report: object, *tables: ResultTable, section: str, json: Path | None, docs: Path | None
) -> None:
    """Print tables; write all figures of a report as JSON, and the tables into a document.

    Args:
        report: all figures, of types that msgspec encodes.
        tables: what is shown of them.
        section: the document's section, see ``replace_section``.
        json, docs: files to write; None writes none.
    """
    reporting.publish(report, Group(*(table.drawn() for table in tables)), json)
    if docs is not None:
        replace_section(docs, section, markdown(tables))


def markdown(tables: Iterable[ResultTable]) -> str:
    """Return tables for a document."""
    return "\n\n".join(table.markdown() for table in tables)
