"""`fxpar bench step`: what a training step costs, from choosing layouts to running it."""

from __future__ import annotations

from itertools import chain

from fxpar.bench.report import Report, Say
from fxpar.bench.step.compile_time import compile_time
from fxpar.bench.step.executor_overhead import executor_overhead
from fxpar.bench.step.layout_search import layout_search
from fxpar.bench.step.step_time import step_time


def run(say: Say) -> Report:
    """Takes some minutes on four ranks."""
    found = list(chain(layout_search(say), compile_time(say), executor_overhead(say), step_time(say)))
    return Report([row for row, _ in found], [bar for _, bar in found if bar is not None])
