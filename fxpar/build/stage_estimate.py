"""The time and the traffic of one stage's graphs: for every microbatch, and once per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpar.costs.graph_time import GraphModel, GraphTime, Traffic, add_up, one_after_another
from fxpar.graph.extract import returned
from fxpar.ir.node_meta import Communication, tensor
from fxpar.ir.stage import PortKind
from fxpar.passes.bucket_collectives import BUCKET_BYTES
from fxpar.passes.stage_graphs import StageGraphs
from fxpar.runtime.gradients import partial_axes, summed_over_z
from fxpar.schedule import Kind


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """The estimate of a stage on one of its ranks.

    actions: of one microbatch.
    once: gathers of weights and reductions of gradients that run once per step, one after another.
    """

    actions: Mapping[Kind, GraphTime]
    once: GraphTime

    @property
    def times_us(self) -> dict[Kind, float]:
        """The time of each action, from its start to its end."""
        return {kind: action.total_us for kind, action in self.actions.items()}

    @property
    def kinds_of_microbatch(self) -> list[Kind]:
        """Forward and backward of one microbatch; if the schedule splits only some backwards, as if none were split."""
        kinds: Sequence[Kind] = ("F", "B") if "B" in self.actions else ("F", "I", "W")
        return [kind for kind in kinds if kind in self.actions]

    @property
    def microbatch(self) -> list[GraphTime]:
        """The times of `kinds_of_microbatch`."""
        return [self.actions[kind] for kind in self.kinds_of_microbatch]

    def action(self, kind: Kind) -> GraphTime:
        """The time of an action; a backward that only runs in two parts takes as long as both."""
        if kind in self.actions:
            return self.actions[kind]
        return one_after_another(self.actions[part] for part in ("I", "W"))

    def traffic(self, microbatches: int) -> dict[str, Traffic]:
        """The communication of a step, by axis."""
        each = add_up(action.traffic for action in self.microbatch)
        return add_up([self.once.traffic, {axis: traffic.times(microbatches) for axis, traffic in each.items()}])


def estimate_stage(graphs: StageGraphs, model: GraphModel) -> StageEstimate:
    """The times of a stage's graphs, which must be in the order in which they are to run."""
    actions = {kind: model.time(module) for kind, module in graphs.of_actions.items()}
    parts = [model.time(part.module) for part in (graphs.hoisted.gathers, graphs.hoisted.reductions) if part]
    parts.append(gradient_reduction(graphs, model))
    return StageEstimate(actions, one_after_another(parts))


def gradient_reduction(graphs: StageGraphs, model: GraphModel) -> GraphTime:
    """All-reduces of gradients after the last microbatch: of partial ones over their axes, then over the batch axes."""
    local = graphs.local
    layouts = {port.name: layout for port, layout in graphs.planned.border.gradients.items()}
    scattered = summed_over_z(layouts)
    num_bytes: defaultdict[str, int] = defaultdict(int)
    for node, port in zip(returned(local.module)[len(local.outputs) :], local.gradients, strict=True):
        if port.kind is PortKind.PARAMETER:
            over_batch = ("data",) if port.name in scattered else ("data", "z")
            for axis in (*partial_axes(layouts[port.name]), *over_batch):
                num_bytes[axis] += tensor(node).nbytes
    traffic = {axis: _in_buckets(axis, of_axis, model) for axis, of_axis in num_bytes.items()}
    times_us = {axis: each.time_us for axis, each in traffic.items()}
    return GraphTime(sum(times_us.values()), 0.0, traffic, exposed_by_axis_us=times_us)


def _in_buckets(axis: str, num_bytes: int, model: GraphModel) -> Traffic:
    whole, rest = divmod(num_bytes, BUCKET_BYTES)
    parts = [BUCKET_BYTES] * whole + [rest] * (rest > 0)
    return add_up({axis: model.traffic(Communication("all_reduce", axis, part))} for part in parts).get(axis, Traffic())
