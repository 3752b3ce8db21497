"""Tables as text, for dumps and for what prints itself."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_WIDEST = 10_000


def text_of(table: Table, width: int = _WIDEST) -> str:
    """A rich table as lines of at most `width` columns, without spaces at their ends."""
    from rich.console import Console  # it takes a tenth of a second to import, and most steps write no tables

    text = StringIO()
    Console(file=text, width=width).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
