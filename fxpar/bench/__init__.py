"""Benchmarks: each module `fxpar.bench.NAME` listed here has a function `run` that measures and gives a `Report`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What the command line knows of a benchmark, without importing it."""

    measures: str
    modes: Mapping[str, str] = field(default_factory=dict)
    """Name -> what it does. The flag --NAME calls `run(say, mode=NAME)`; without a flag it is `run(say)`."""


BENCHMARKS = {
    "step": Benchmark(
        "choosing layouts, compiling, executor overhead, and step time against torch.distributed.pipelining"
    ),
}
"""Name -> what the benchmark is."""
