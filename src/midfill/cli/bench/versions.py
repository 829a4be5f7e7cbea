"""What the commands share that compare two versions of midfill."""

from pathlib import Path
from typing import TYPE_CHECKING

from midfill.system.reporting.publish import publish

if TYPE_CHECKING:
    from midfill.lab.bench.versions.report import VersionsReport


def publish_versions(report: "VersionsReport", json: Path | None, docs: Path | None) -> None:
    """Show the ratios of two versions."""
    from midfill.lab.bench.versions.report import versions_table

    table = versions_table(report)
    section = f"{report.benchmark}-versions"
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)


def absolute_model(model: str) -> str:
    """Return a model that is named by a path by its absolute path."""
    return str(Path(model).absolute()) if Path(model).exists() else model
