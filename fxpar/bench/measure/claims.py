"""Claims of benchmarks about the speed of interleaved steps, compared with the measured ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpar.bench.measure.interleaved import Timing, all_disturbed, median_ratio
from fxpar.bench.report import Bar, Row, at_least


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim that steps of `slower` take at least `goal` times as long as those of `faster`."""

    faster: str
    slower: str
    goal: float

    def __str__(self) -> str:
        return f"{self.faster} over {self.slower}"


def hold(
    kind: str, case: str, claims: Sequence[Claim], timings: Mapping[str, Sequence[Timing]]
) -> tuple[Row, list[Bar]]:
    """The measured ratios of a case, as a row whose first column is called `kind`, and their bars."""
    row: dict[str, str | int | float | bool] = {kind: case}
    bars = []
    for claim in claims:
        ratio = row[str(claim)] = median_ratio(timings, claim.slower, claim.faster)
        disturbed = all_disturbed(timings[claim.slower], timings[claim.faster])
        bars.append(at_least(f"{case}: {claim}", ratio, claim.goal, disturbed=disturbed))
    return row, bars
