"""Predict how long a schedule takes, given how long its parts take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
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
    stages there is one link per direction, which moves one transfer after another.
    Raises InvalidScheduleError if actions wait for each other.
    """
    routes = Routes(edges)
    spans: dict[Action, tuple[float, float]] = {}
    arrivals: dict[Transfer, float] = {}
    rank_free = [0.0] * schedule.num_stages
    link_free: dict[tuple[int, int], float] = {}
    for action in _in_order_of_dependence(schedule, routes):
        start = max([rank_free[action.stage], *(arrivals[transfer] for transfer in routes.received(action))])
        end = start + compute_ticks[action.kind][action.stage]
        spans[action] = start, end
        rank_free[action.stage] = end
        for transfer in routes.sent(action):
            link = transfer.source, transfer.target
            ticks = backward_transfer_ticks if transfer.is_backward else forward_transfer_ticks
            arrivals[transfer] = link_free[link] = max(end, link_free.get(link, 0.0)) + ticks
    return Timeline(spans)


def _in_order_of_dependence(schedule: Schedule, routes: Routes) -> list[Action]:
    """All actions, each after the one before it on its rank and after those that make what it needs."""
    all_actions = [action for actions in schedule.ranks for action in actions]
    makers = {transfer: action for action in all_actions for transfer in routes.sent(action)}
    sorter: TopologicalSorter[Action] = TopologicalSorter()
    for action in all_actions:
        sorter.add(action, *(makers[transfer] for transfer in routes.received(action)))
    for previous, action in (pair for actions in schedule.ranks for pair in pairwise(actions)):
        sorter.add(action, previous)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        cycle = " <- ".join(map(str, error.args[1]))
        raise InvalidScheduleError(f"{schedule.name}: these actions wait for each other: {cycle}") from None
