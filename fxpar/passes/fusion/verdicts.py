"""Whether every collective of a graph was fused, and why; as data, and as a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxpar.ir.node_meta import Communication
from fxpar.passes.fusion.fusion_costs import FusionCost
from fxpar.report.text_table import text_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the collective of the node name `collective` was fused, and why.

    module: the path of the module that it belongs to; in a backward, that of the forward.
    fused: the name of the fused op that replaced it; None if it was left.
    matmuls: the names of the matmuls that are part of that op.
    """

    collective: str
    done: Communication
    module: str
    fused: str | None
    matmuls: tuple[str, ...]
    reason: str
    cost: FusionCost

    @property
    def text(self) -> str:
        """The verdict for a line of the table."""
        if self.fused is None:
            return f"left: {self.reason}"
        return f"fused into {self.fused} with {', '.join(self.matmuls)}: {self.reason}"


Verdicts: TypeAlias = Mapping[str, Sequence[Verdict]]
"""By the name of a graph, the verdicts on its collectives in order."""


@dataclass(frozen=True, slots=True)
class VerdictTable:
    """As text: one line for every collective of every graph, by the graphs' names, and how many of them are fused."""

    verdicts: Verdicts

    def __str__(self) -> str:
        from rich.table import Table  # takes long to import

        table = Table("graph", "collective", "kind", "axis", box=None, pad_edge=False)
        for title in ("bytes", "us alone", "us apart", "us fused"):
            table.add_column(title, justify="right")
        table.add_column("module")
        table.add_column("verdict")
        for graph, of_graph in self.verdicts.items():
            for verdict in of_graph:
                table.add_row(graph, *_row(verdict))
        found = [each for of_graph in self.verdicts.values() for each in of_graph]
        num_fused = sum(each.fused is not None for each in found)
        return f"{text_of(table)}\n\n{num_fused} of {len(found)} collectives are fused with matmuls."


def _row(verdict: Verdict) -> Iterator[str]:
    done, cost = verdict.done, verdict.cost
    yield from (verdict.collective, done.kind, done.axis, str(done.num_bytes))
    yield from (_figure(us) for us in (cost.collective_us, cost.apart_us, cost.fused_us))
    yield from (verdict.module, verdict.text)


def _figure(us: float) -> str:
    return "-" if math.isinf(us) else f"{us:.1f}"
