"""ResultTable: what was measured, as a table on the terminal and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table before it is drawn.

    Attributes:
        rows: each one column's head -> cell; all have the same heads.
        labels: how many columns, the first ones, hold words; the others hold numbers.
        title: stands above it on the terminal.
        caption: sentences below it.
    """

    rows: Sequence[Mapping[str, str]]
    labels: int = 1
    title: str | None = None
    caption: str | None = None

    def drawn(self, **style: Any) -> Table:
        """For the terminal; ``style`` goes to rich's ``Table``."""
        table = Table(title=self.title, caption=self.caption, **style)
        for place, head in enumerate(self.rows[0]):
            table.add_column(head, justify="left" if place < self.labels else "right")
        for row in self.rows:
            table.add_row(*map(Text, row.values()))  # names may look like rich's markup
        return table

    def markdown(self, *, numbers: str = "---") -> str:
        """For a document, without the title; ``numbers`` is what aligns columns of numbers."""
        heads = list(self.rows[0])
        rule = ["---"] * self.labels + [numbers] * (len(heads) - self.labels)
        lines = [heads, rule, *(row.values() for row in self.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return text if self.caption is None else f"{text}\n\n{self.caption}"
