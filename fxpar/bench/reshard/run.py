"""`fxpar bench reshard`: the time of resharding between meshes, simulated, on emulated hosts, or on a real network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from fxpar.bench.report import Bar, Report, Row, Say
from fxpar.bench.reshard.emulated import emulate
from fxpar.bench.reshard.planning_time import planning_time
from fxpar.bench.reshard.real import measure_here
from fxpar.bench.reshard.simulated import simulate

MODES: Mapping[str, Callable[[Say], Iterable[tuple[Row, list[Bar]]]]] = {
    "simulate": lambda say: chain(simulate(say), planning_time(say)),
    "emulate": emulate,
    "real": measure_here,
}


def run(say: Say, mode: str = "real") -> Report:
    """Takes some seconds; half a minute to simulate, and 7 minutes to emulate."""
    found = list(MODES[mode](say))
    return Report([row for row, _ in found], [bar for _, bars in found for bar in bars])
