"""ResultTable: a table of results, for the terminal and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table before it is drawn.

    Attributes:
        rows: mappings of column heads to cells; all have the same heads.
        labels: how many of the first columns hold words; the others hold numbers.
        title: shown above it on the terminal.
        caption: shown below it.
    """

    rows: Sequence[Mapping[str, str]]
    labels: int = 1
    title: str | None = None
    caption: str | None = None

    def drawn(self, **style: Any) -> Table:
        """Return the table for the terminal; ``style`` is passed to rich's ``Table``."""
        table = Table(title=self.title, caption=self.caption, **style)
        for place, head in enumerate(self.rows[0]):
            table.add_column(head, justify="left" if place < self.labels else "right")
        for row in self.rows:
            table.add_row(*map(Text, row.values()))  # names may contain rich's markup
        return table

    def markdown(self, *, numbers: str = "---") -> str:
        """Return the table for a document, without title; ``numbers`` aligns columns of numbers."""
        heads = list(self.rows[0])
        rule = ["---"] * self.labels + [numbers] * (len(heads) - self.labels)
        lines = [heads, rule, *(row.values() for row in self.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return text if self.caption is None else f"{text}\n\n{self.caption}"
