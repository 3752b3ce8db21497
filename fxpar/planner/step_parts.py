"""Where the time of an estimated step goes, on the pipe rank that is busiest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxpar.build.stage_estimate import StageEstimate
from fxpar.costs.graph_time import GraphTime, one_after_another
from fxpar.report.step_parts import PIPE, StepParts
from fxpar.schedule import Compute, Program

_OPTIMIZER_PASSES = 3.5
"""How often Adam's step reads or writes memory of the size of its states, two per weight: it reads weight, gradient and
states, and writes weight and states."""


def step_parts(
    actions: GraphTime, once: GraphTime, makespan_us: float, makespan_without_messages_us: float
) -> StepParts:
    """The parts of a step on the busiest pipe rank.

    The bubble is the time in which it has nothing to do even if messages take no time; messages are exposed for what
    they add to it.

    Args:
        actions: all that the busiest pipe rank computes.
        once: what runs once per step, after all actions.
        makespan_us, makespan_without_messages_us: of the actions of all ranks, the latter if messages took no time.
    """
    idle_us = makespan_us - actions.total_us
    # A schedule may be slower by chance where messages take no time.
    messages_us = min(max(0.0, makespan_us - makespan_without_messages_us), idle_us)
    whole = one_after_another([actions, once])
    by_axis = {PIPE: messages_us, **whole.exposed_by_axis_us}
    exposed = {axis: time_us for axis, time_us in by_axis.items() if time_us > 0}
    return StepParts(whole.compute_us, exposed, idle_us - messages_us)


def actions_time(program: Program, stages: Sequence[StageEstimate]) -> GraphTime:
    """The time of all computations of a pipe rank's program."""
    actions = [each.action for each in program.instructions if isinstance(each, Compute)]
    return one_after_another(stages[action.stage].action(action.kind) for action in actions)


def busiest(times: Iterable[GraphTime]) -> GraphTime:
    """The longest of the times."""
    return max(times, key=lambda time: time.total_us)


def optimizer_us(state_bytes: int, memory_bytes_per_us: float) -> float:
    """The time of Adam's step over states of so many bytes, at the memory's bandwidth."""
    return _OPTIMIZER_PASSES * state_bytes / memory_bytes_per_us
