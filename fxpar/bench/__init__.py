"""Benchmarks: each module `fxpar.bench.NAME` listed here has a function `run` that measures and gives a `Report`."""

BENCHMARKS = {
    "step": "choosing layouts, compiling, executor overhead, and step time against torch.distributed.pipelining",
}
"""Name -> what it measures."""
