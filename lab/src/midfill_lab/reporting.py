"""Present results: tables for the terminal and for documents, figures as JSON, sizes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from midfill.system.files import write_file


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table before it is drawn.

    Attributes:
        rows: mappings of column heads to cells; all have the same heads.
        labels: how many of the first columns hold words; the others hold numbers.
        title: shown above it on the terminal.
        titled: whether documents show the title, too.
        caption: shown below it.
    """

    rows: Sequence[Mapping[str, str]]
    labels: int = 1
    title: str | None = None
    titled: bool = False
    caption: str | None = None

    def drawn(self, **style: Any) -> Table:
        """Return the table for the terminal; ``style`` is passed to rich's ``Table``."""
        table = Table(title=self.title, caption=self.caption, **style)
        for place, head in enumerate(self.rows[0]):
            table.add_column(head, justify="left" if place < self.labels else "right")
        for row in self.rows:
            table.add_row(*map(Text, row.values()))  # names may contain rich's markup
        return table

    def markdown(self) -> str:
        """Return the table for a document."""
        heads = list(self.rows[0])
        lines = [heads, ["---"] * len(heads), *(row.values() for row in self.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        title = f"**{self.title}**\n\n" if self.titled else ""
        return title + text + (f"\n\n{self.caption}" if self.caption else "")


def replace_section(path: Path, name: str, body: str) -> None:
    """Replace what is between the marks ``<!-- name -->`` and ``<!-- /name -->`` of a document.

    If the document lacks the marks, the section is added at its end; a missing document is created.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = f"{start}\n{body.strip()}\n{end}"
    text = path.read_text("utf-8") if path.exists() else "# Benchmarks\n"
    if start in text and end in text:
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + section + after
    else:
        text = text.rstrip("\n") + "\n\n" + section + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


_WIDTH = 130
"""Columns of what is not a terminal: enough for the tables."""


def wide_console() -> Console:
    """Return standard output, wide enough for the tables if it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def publish(report: object, drawn: RenderableType, json: Path | None) -> None:
    """Print a report, and write all its figures into a file.

    Args:
        report: of types that msgspec encodes.
        drawn: its form on the terminal.
        json: the file; None writes none.

    Raises:
        MidfillError: the file can't be written.
    """
    wide_console().print(drawn)
    if json is not None:
        write_json(json, report)


def publish_tables(
    report: object,
    tables: Sequence[ResultTable],
    *,
    json: Path | None,
    docs: Path | None,
    section: str,
) -> None:
    """Print tables; write all figures of a report as JSON, and the tables into a document.

    Args:
        report: all figures, of types that msgspec encodes.
        tables: what is shown of them.
        json, docs: files to write; None writes none.
        section: the document's section, see ``replace_section``.

    Raises:
        MidfillError: a file can't be written.
    """
    publish(report, Group(*(table.drawn() for table in tables)), json)
    if docs is not None:
        replace_section(docs, section, markdown(tables))


def markdown(tables: Iterable[ResultTable]) -> str:
    """Return tables for a document."""
    return "\n\n".join(table.markdown() for table in tables)


def saver(json: Path | None) -> Callable[[object], None]:
    """Return what writes a report so far into a file; None writes it nowhere."""
    return lambda report: None if json is None else write_json(json, report)


def write_json(path: Path, report: object) -> None:
    """Write all figures of a report; the file is replaced as a whole.

    Raises:
        MidfillError: it can't be written.
    """
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
