"""What ranks do to try the benchmark of fused ops; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fxpar.bench.fused.cases import FusedCase
from fxpar.bench.fused.matmuls import MATMULS
from fxpar.bench.fused.run import run_variants, time_matmuls
from fxpar.bench.measure.interleaved import Sample


def run_small(case: FusedCase) -> tuple[Mapping[str, Sequence[Sample]], Mapping[str, Sequence[Sample]]]:
    """All matmuls of a case, and all ways, once."""
    return time_matmuls(case, warm_up=0, tries=1), run_variants(case, MATMULS[0], warm_up=0, tries=1)


def compute(case: FusedCase) -> dict[str, Tensor]:
    """What every way of a case returns."""
    return {name: way().clone() for name, way in case.ways(MATMULS[-1]).items()}
