"""What benchmarks say of steps that took turns, held against what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpar.bench.report import Bar, Row, at_least
from fxpar.bench.turns import Turn, median_ratio


@dataclass(frozen=True, slots=True)
class Claim:
    """That steps of `slower` take at least `goal` times as long as those of `faster`."""

    faster: str
    slower: str
    goal: float

    def __str__(self) -> str:
        return f"{self.faster} over {self.slower}"


def hold(
    kind: str, case: str, claims: Sequence[Claim], turns: Mapping[str, Sequence[Turn]], most_others: float
) -> tuple[Row, list[Bar]]:
    """The ratios of a case, a benchmark's `kind` of thing, and the bars that they must reach."""
    ratios = {claim: median_ratio(turns, claim.slower, claim.faster, most_others) for claim in claims}
    row: Row = {kind: case, **{str(claim): ratio for claim, ratio in ratios.items()}}
    return row, [at_least(f"{case}: {claim}", ratio, claim.goal) for claim, ratio in ratios.items()]
