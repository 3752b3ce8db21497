"""The input of every part of a build, and what is told of it to other ranks and to later launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.cache.ambient import ambient_state
from fxpar.config import Options
from fxpar.costs.prices import cluster_of, memory_of
from fxpar.ir.capture import Capture, example
from fxpar.ir.stage import PortKind
from fxpar.model.distribution import Distribution
from fxpar.pass_log import PassLog
from fxpar.rules import registered_rules
from fxpar.runtime.loss import Loss
from fxpar.schedule import Costs, Schedule, check_trains, forward_only
from fxpar.schedule.choose_schedule import check_placement, choose_schedule
from fxpar.world.mesh import Mesh


@dataclass(frozen=True)
class Task:
    """A captured forward, and how it is to be built."""

    capture: Capture
    options: Options
    distribution: Distribution
    log: PassLog
    with_backward: bool

    @property
    def mesh(self) -> Mesh:
        return self.distribution.mesh

    @property
    def microbatches(self) -> int:
        return self.distribution.microbatches_of(self.capture)

    @property
    def loss(self) -> Loss | None:
        """Position and dtype of `Capture.loss`, or, in a step without a backward, of `Capture.reported`."""
        position = self.capture.loss if self.with_backward else self.capture.reported
        return None if position is None else Loss(position, example(self.capture.results[position]).dtype)

    @property
    def memory_budget(self) -> float:
        """The memory that one rank may use, in bytes."""
        return self.options.memory_bytes or memory_of(self.mesh.device_type)

    def schedule(self, costs: Costs) -> Schedule:
        """The schedule for stages with these costs.

        Raises:
            InvalidScheduleError: the schedule does not fit this model, or has no backwards where they are needed.
        """
        plan, mesh = self.distribution.final_plan, self.mesh
        schedule = choose_schedule(self.options.schedule or plan.schedule, costs, mesh.pipe, self.microbatches)
        check_placement(schedule, self.distribution.placement)
        if not self.with_backward:
            return forward_only(schedule)
        check_trains(schedule)
        return schedule

    @property
    def arguments(self) -> str:
        """The tensor arguments of the forward, one per line: name, dtype, and shape of one microbatch."""
        given = {port for port in self.capture.arguments if port.kind is PortKind.INPUT}
        entering = [(port, node) for node, port in self.capture.sources.items() if port in given]
        return "\n".join(
            f"{self.distribution.input_name(port.name)}: {example(node).dtype} {tuple(example(node).shape)}"
            for port, node in entering
        )

    @property
    def kind(self) -> str:
        return "the training step" if self.with_backward else "the evaluation"

    @property
    def microbatch(self) -> str:
        """`arguments` in a line."""
        return f"microbatches of {', '.join(self.arguments.splitlines()).replace('torch.', '')}"

    @property
    def call(self) -> str:
        """What ranks have to call alike."""
        return f"{self.kind} for {self.microbatch}"

    @cached_property
    def facts(self) -> dict[str, str]:
        """What every rank must be given alike, by the name under which an error reports it."""
        options, mesh = self.options, self.mesh
        return {
            "the mesh": str(mesh),
            "the hosts of ranks": str(mesh.hosts),
            "the cluster": str(cluster_of(mesh)),
            "the arguments of the forward": self.arguments,
            "the captured forward": self.capture.signature,
            "the plan": str(self.distribution.final_plan),
            "the precision": f"{self.distribution.precision}\n{self.distribution.dtypes}",
            "the options for results": f"{options.results} {options.check_inputs}",
            "the options for memory": f"{options.memory_bytes} {options.gather_weights} {options.reduce_gradients} "
            f"{options.remat} {options.gathered_bytes}",
        }

    @cached_property
    def question(self) -> str:
        """All that this rank's program depends on, as text."""
        mesh, distribution = self.mesh, self.distribution
        given = (
            *self.facts.values(),
            self.capture.description,
            replace(self.options, dump=None, timeline=None),
            self.with_backward,
            mesh.device_type,
            mesh.coordinate,
            [mesh.group(axis).group_name for axis in mesh.stage_axes],
            distribution.hints,
            distribution.placement,
            self.memory_budget,
            registered_rules(),
            ambient_state(),
        )
        return "\n".join(map(str, given))

    @property
    def may_be_kept(self) -> bool:
        """Whether the question says all: nothing is timed on this machine, shown, or defined by users."""
        options = self.options
        measured = options.profile or self.mesh.moves_in_groups
        return self.capture.is_self_contained and not (registered_rules() or measured or self.log.dump.is_read)
