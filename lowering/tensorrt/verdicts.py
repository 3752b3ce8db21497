"""Which code runs every subgraph, and why; as data, and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpar.report.text_table import text_of

BUILT = "all ops have converters"
"""The reason for an engine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What runs one piece of a region, and of the regions that equal it.

    graph: the number of the graph among those that this rank lowered.
    region: the number of the region among the distinct ones of its graph.
    num_ops: how many ops of the piece compute something; views do not.
    is_engine: whether TensorRT runs it, rather than Inductor.
    """

    graph: int
    region: int
    num_ops: int
    is_engine: bool
    reason: str


@dataclass(frozen=True, slots=True)
class VerdictTable:
    """As text: one line for every piece, in the order of compilation, and what share of ops engines run."""

    verdicts: Sequence[Verdict]

    def __str__(self) -> str:
        from rich.table import Table  # takes long to import

        table = Table("graph", "region", box=None, pad_edge=False)
        table.add_column("ops", justify="right")
        table.add_column("runs by")
        table.add_column("reason")
        for each in self.verdicts:
            code = "TensorRT" if each.is_engine else "Inductor"
            table.add_row(str(each.graph), f"region_{each.region}", str(each.num_ops), code, each.reason)
        engines = [each for each in self.verdicts if each.is_engine]
        in_engines, in_all = (sum(each.num_ops for each in some) for some in (engines, self.verdicts))
        total = f"{in_engines} of {in_all} ops are in {len(engines)} TensorRT engines; equal regions count once."
        return f"{text_of(table)}\n\n{total}"
