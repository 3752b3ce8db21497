"""`fxpar bench pipeline`: how much communication schedules hide, compared with each other and torch's pipelines."""

from __future__ import annotations

from itertools import chain

from fxpar.bench.pipeline.computing import computing, computing_here
from fxpar.bench.pipeline.sleeping import sleeping
from fxpar.bench.report import Report, Say


def run(say: Say, mode: str = "here") -> Report:
    """Sleeping stages and then computing ones on emulated hosts, or computing ones on this machine; takes minutes."""
    found = list(chain(sleeping(say), computing(say)) if mode == "emulate" else computing_here(say))
    return Report([row for row, _ in found], [bar for _, bars in found for bar in bars])
