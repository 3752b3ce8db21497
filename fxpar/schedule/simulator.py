"""Predict how long a schedule takes, given how long its parts take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise

from fxpar.errors import InvalidScheduleError
from fxpar.schedule.action import Action, Kind
from fxpar.schedule.schedule import Schedule
from fxpar.schedule.transfer import Edge, Routes, Transfer


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every action starts and ends, in the ticks of the costs it was simulated with."""

    spans: Mapping[Action, tuple[float, float]]

    @property
    def makespan_ticks(self) -> float:
        """From the start of the step, 0, to the end of its last action."""
        return max(end for _, end in self.spans.values())


def simulate(
    schedule: Schedule,
    edges: Sequence[Edge],
    compute_ticks: Mapping[Kind, Sequence[float]],
    forward_transfer_ticks: float = 0.0,
    backward_transfer_ticks: float = 0.0,
) -> Timeline:
    """Run each rank's actions in order, each as soon as all it needs has arrived.

    `compute_ticks[kind][stage]` is what an action takes. Communication overlaps with computation; between two
    stages there is one link per direction, which moves one transfer after another. A multicast takes the links from
    its source to its first target and on from target to target, all at once: chunks follow each other closely.
    Raises InvalidScheduleError if actions wait for each other.
    """
    routes = Routes(edges)
    spans: dict[Action, tuple[float, float]] = {}
    arrivals: dict[Transfer, float] = {}
    rank_free = [0.0] * schedule.num_stages
    link_free: dict[tuple[int, int], float] = {}
    order = _order_of_dependence(schedule, routes)
    running: list[tuple[float, int, Action]] = []
    while order.is_active():
        for action in order.get_ready():
            start = max([rank_free[action.stage], *(arrivals[transfer] for transfer in routes.received(action))])
            end = start + compute_ticks[action.kind][action.stage]
            spans[action] = start, end
            rank_free[action.stage] = end
            heappush(running, (end, action.stage, action))
        # Links serve the first to end first; whatever is ready later ends later.
        end, _, action = heappop(running)
        for transfer in routes.sent(action):
            links = list(pairwise((transfer.source, *transfer.targets)))
            ticks = backward_transfer_ticks if transfer.is_backward else forward_transfer_ticks
            arrivals[transfer] = max([end, *(link_free.get(link, 0.0) for link in links)]) + ticks
            link_free.update(dict.fromkeys(links, arrivals[transfer]))
        order.done(action)
    return Timeline(spans)


def _order_of_dependence(schedule: Schedule, routes: Routes) -> TopologicalSorter[Action]:
    """Gives each action after the one before it on its rank and after those that make what it needs."""
    all_actions = [action for actions in schedule.ranks for action in actions]
    makers = {transfer: action for action in all_actions for transfer in routes.sent(action)}
    sorter: TopologicalSorter[Action] = TopologicalSorter()
    for action in all_actions:
        sorter.add(action, *(makers[transfer] for transfer in routes.received(action)))
    for previous, action in (pair for actions in schedule.ranks for pair in pairwise(actions)):
        sorter.add(action, previous)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " <- ".join(map(str, error.args[1]))
        raise InvalidScheduleError(f"{schedule.name}: these actions wait for each other: {cycle}") from None
    return sorter
