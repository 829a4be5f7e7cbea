"""Tables of benchmarks: printed, and written into the documents that show them."""

from pathlib import Path

from midfill_lab.reporting import ResultTable, markdown, publish_tables

__all__ = ["markdown", "publish"]


def publish(
    report: object, *tables: ResultTable, section: str, json: Path | None, docs: Path | None
) -> None:
    """Print tables; see ``reporting.publish_tables`` for the arguments."""
    publish_tables(report, tables, json=json, docs=docs, section=section)
