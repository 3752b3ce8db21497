"""Show a resharding plan as a table, and as a timeline of every host's interface."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.table import Table

from fxpar.report.text_table import text_of
from fxpar.report.timeline import Lane, TimelineBar, draw

if TYPE_CHECKING:
    from fxpar.resharding.plan import Relay, ReshardPlan

_WIDTH = 120


def table(plan: ReshardPlan) -> str:
    """A summary, then a row per relay, in the order in which they begin."""
    columns = ("task", "region", "bytes", "way", "chunks", "begins", "ends")
    grid = Table(*columns, caption="2@1+3,4: rank 2 on host 1, from whose memory ranks 3 and 4 read")
    for relay in plan.relays:
        grid.add_row(
            str(relay.task),
            _region(plan, relay),
            f"{relay.num_elements * plan.itemsize:,}",
            _way(plan, relay),
            str(relay.num_chunks),
            f"{relay.begin:,}" if relay.num_hops else "",
            f"{relay.end:,}" if relay.num_hops else "inside the host",
        )
    return f"{headline(plan)}, {figures(plan)}\n{text_of(grid, _WIDTH)}"


def headline(plan: ReshardPlan) -> str:
    """The strategy, the algorithm and the number of unit tasks."""
    return f"{plan.strategy}, ordered by {plan.algorithm}: {len(plan.tasks)} unit tasks"


def figures(plan: ReshardPlan) -> str:
    """The bytes between hosts, the makespan and its lower bound."""
    return (
        f"{plan.num_bytes:,} bytes between hosts; makespan {plan.makespan_bytes:,}, "
        f"bound {float(plan.bound_bytes):,.0f} bytes at one interface, ratio {plan.ratio:.3f}"
    )


def timeline(plan: ReshardPlan) -> str:
    """An SVG document with two lanes per host, for what it sends and what it receives."""
    lanes: defaultdict[tuple[int, bool], list[TimelineBar]] = defaultdict(list)
    for relay in plan.relays:
        for source, target in pairwise(relay.path):
            details = f"{_region(plan, relay)}, {_way(plan, relay)}, {relay.num_elements * plan.itemsize:,} bytes"
            bar = TimelineBar(relay.begin, relay.end, str(relay.task), f"task {relay.task}: {details}", relay.task)
            lanes[plan.hosts[source], False].append(bar)
            lanes[plan.hosts[target], True].append(bar)
    named = [
        Lane(f"host {host} {'receives' if receives else 'sends'}", lanes[host, receives])
        for host, receives in sorted(lanes, key=lambda key: (key[1], key[0]))
    ]
    marks = [(float(plan.bound_bytes), "bound")] if plan.bound_bytes else []
    return draw(headline(plan), figures(plan), named, marks, "bytes")


def _region(plan: ReshardPlan, relay: Relay) -> str:
    task = plan.tasks[relay.task]
    part = "" if relay.num_elements == task.num_elements else f" {relay.start}:{relay.stop}"
    return f"{task.region}{part}"


def _way(plan: ReshardPlan, relay: Relay) -> str:
    """`2@0 -> 4@1+5,6`: from rank 2 on host 0 to rank 4 on host 1, from whose memory ranks 5 and 6 read."""
    stops = []
    for rank, readers in zip(relay.path, relay.readers, strict=True):
        fed = "+" + ",".join(map(str, readers)) if readers else ""
        stops.append(f"{rank}@{plan.hosts[rank]}{fed}")
    return " -> ".join(stops)
