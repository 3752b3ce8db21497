"""The time to plan many unit tasks: layouts of real meshes, with shards of uneven sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.calibrate.network import alternate
from fxpar.resharding.cases import ITEMSIZE, CaseMesh, CaseTransfer
from fxpar.resharding.plan import make_plan, whole_flow
from fxpar.resharding.search import search
from fxpar.resharding.units import unit_tasks

GOALS_S = {64: 0.02, 1024: 1.0, 16384: 5.0}
"""Unit tasks -> how long the search may take."""

REPEATS = 3
SHAPE = (1020, 8190, 24)
"""The first two dims are sharded unevenly below, and every device has a part."""


def _crossing(
    holders: str, rows: str, source: tuple[int, int], columns: str, destination: tuple[int, int]
) -> CaseTransfer:
    """From a sharding of rows to one of columns, so that every source part overlaps every destination part."""
    by = {"hosts": (0,), "devices": (1,), "both": (0, 1)}
    ends = CaseMesh(source, (by[rows], (), ())), CaseMesh(destination, ((), by[columns], ()))
    return CaseTransfer(holders, SHAPE, *ends)


CROSSINGS = (
    _crossing("one host", "hosts", (8, 8), "hosts", (8, 8)),
    _crossing("one device", "both", (2, 4), "both", (2, 4)),
    _crossing("every host", "devices", (4, 8), "both", (2, 4)),
    _crossing("one host", "hosts", (32, 8), "hosts", (32, 8)),
    _crossing("one device", "both", (4, 8), "both", (4, 8)),
    _crossing("every host", "devices", (16, 8), "both", (16, 8)),
    _crossing("one host", "hosts", (128, 8), "hosts", (128, 8)),
    _crossing("one device", "both", (16, 8), "both", (16, 8)),
    _crossing("every host", "devices", (16, 8), "both", (256, 8)),
)
"""Named by what holds each part at the source; meshes are (hosts, devices per host)."""


def planning_time(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """Seconds of thread time, which other processes do not affect; the bars are of the search."""
    for crossing in CROSSINGS:
        say(f"planning {crossing.source.mesh} -> {crossing.destination.mesh}")
        row = time_plan(crossing)
        num_tasks = int(row["unit_tasks"])
        name = f"search for {num_tasks} unit tasks held by {crossing.name}, seconds"
        yield row, [at_most(name, float(row["search_s"]), GOALS_S[num_tasks])]


def time_plan(crossing: CaseTransfer, repeats: int = REPEATS) -> Row:
    """The medians of the search for senders and order, and of the whole plan by the default algorithm."""
    tiles, hosts = crossing.tiles(), crossing.hosts
    flows = [whole_flow(task, ITEMSIZE, hosts) for task in unit_tasks(*tiles)]
    plan = make_plan(*tiles, ITEMSIZE, hosts)  # also warms up caches for what is timed
    seconds = _timed({"search_s": lambda: search(flows), "plan_s": lambda: make_plan(*tiles, ITEMSIZE, hosts)}, repeats)
    meshes = (f"{hosts}x{devices}" for hosts, devices in (crossing.source.mesh, crossing.destination.mesh))
    return {
        "parts_held_by": crossing.name,
        "meshes": " -> ".join(meshes),
        "unit_tasks": len(flows),
        **seconds,
        "makespan_over_bound": plan.ratio,
    }


def _timed(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The medians of interleaved calls."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for name in alternate(list(works), repeats):
        start = time.thread_time()
        works[name]()
        seconds[name].append(time.thread_time() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}
