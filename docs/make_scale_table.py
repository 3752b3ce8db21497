"""Print the Markdown table of docs/benchmarks.md about scale: python docs/make_scale_table.py FILE

FILE is what `fxpar bench compile --scale --json` wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_HEAD = (
    "| model | layers | kinds | stages | ranks | microbatches | capture, s | other planning, s | passes, s | GB |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def main() -> None:
    """Print the table."""
    rows: list[Mapping[str, Any]] = json.loads(Path(sys.argv[1]).read_text())["rows"]
    print("\n".join([*_HEAD, *table(rows)]))


def table(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each configuration."""
    for row in rows:
        named = (row[name] for name in ("model", "layers", "kinds", "stages", "ranks", "microbatches"))
        measured = row["capture_s"], row["planning_s"] - row["capture_s"], row["passes_s"]
        cells = [*(f"{cell:,}" if isinstance(cell, int) else cell for cell in named)]
        cells += [*(f"{seconds:.1f}" for seconds in measured), f"{row['peak_gb']:.2f}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
