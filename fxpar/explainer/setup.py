"""How a model is trained: what `init_mesh`, `distribute` and `torch.compile` are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fxpar.config import Options, read_options
from fxpar.ir.remat import Remat
from fxpar.ir.storage_options import storage_choices
from fxpar.model.resolve_layouts import Layouts
from fxpar.planner.configuration import Configuration
from fxpar.planner.step_model import MemoryPolicy
from fxpar.schedule import GivenSchedule, schedule_text
from fxpar.world.mesh import mesh_sizes


@dataclass(frozen=True, slots=True)
class Setup:
    """A mesh, what `distribute` is given beside it, and the options of the backend.

    mesh: axis -> size, of all axes.
    schedule: a name, or a user's own as text.
    options: except for the schedule.
    """

    mesh: Mapping[str, int] = field(hash=False)
    microbatches: int
    schedule: str
    stages: tuple[str, ...] | int | None
    layouts: Layouts = field(hash=False)
    options: Options = field(hash=False)

    @property
    def configuration(self) -> Configuration:
        """The mesh and the number of microbatches, as the planner compares them."""
        return Configuration(self.mesh, self.microbatches)

    @property
    def memory_policies(self) -> list[MemoryPolicy]:
        """The policies that the options leave open, the fastest first: a step runs by the first that fits."""
        options = self.options
        remat = Remat(options.remat, options.gathered_bytes)
        gathers, reduces, parts = options.gather_weights, options.reduce_gradients, self.mesh["z"]
        return [MemoryPolicy(remat, each) for each in storage_choices(gathers, reduces, self.microbatches, parts)]

    @property
    def given_options(self) -> dict[str, Any]:
        """The options that are not the default, as `torch.compile` takes them."""
        default = Options()
        values = {each.name: getattr(self.options, each.name) for each in fields(Options)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    @property
    def distribute_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `distribute`."""
        return {
            "stages": self.stages,
            "layouts": self.layouts,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
        }


def read_setup(
    mesh: Mapping[str, int] | str,
    microbatches: int,
    schedule: GivenSchedule,
    stages: Sequence[str] | int | None,
    layouts: Layouts,
    options: Mapping[str, Any] | None,
) -> Setup:
    """The setup that a user gives in the forms that `init_mesh`, `distribute` and `torch.compile` take.

    Raises:
        InvalidMeshError: the mesh is none.
        UnknownScheduleError, InvalidScheduleError: the schedule is none.
        and what `read_options` raises.
    """
    read = read_options(options)
    given = read.schedule or schedule_text(schedule)
    opening = stages if stages is None or isinstance(stages, int) else tuple(stages)
    return Setup(mesh_sizes(mesh), microbatches, given, opening, layouts, replace(read, schedule=None, dump=None))
