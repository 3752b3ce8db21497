"""What ranks do to try the benchmark of fused ops; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fxpar.bench.fused import run_ways
from fxpar.bench.fused_cases import Case
from fxpar.bench.turns import Sample


def run_small(case: Case) -> Mapping[str, Sequence[Sample]]:
    """All ways of a case, once."""
    return run_ways(case, warm_up=0)


def compute(case: Case) -> dict[str, Tensor]:
    """What every way of a case gives."""
    return {name: way() for name, way in case.ways().items()}
