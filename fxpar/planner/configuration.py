"""What the planner chooses among: meshes, numbers of microbatches, schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxpar.costs.equations import configurations
from fxpar.ir.layout import AXES
from fxpar.schedule import NAMED_SCHEDULES
from fxpar.world.mesh import sizes_text

SCHEDULES = tuple(name for name, schedule in NAMED_SCHEDULES.items() if schedule.is_searched)
"""The schedules that are tried by default: those with one stage per rank."""

SPLITTING = tuple(name for name, schedule in NAMED_SCHEDULES.items() if schedule.splits_backward)
"""The schedules that can compute weight gradients while they wait."""

_MICROBATCHES_PER_RANK = (1, 2, 4)
"""Numbers to try by default, per pipe rank: the more, the smaller the bubble, but also the matrices."""

_MICROBATCHES_WITHOUT_PIPELINE = (1, 2, 4, 8, 16, 32)
"""Numbers to try by default: more take less memory, and never less time; see `Configuration.only_saves_memory`."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A mesh and a number of microbatches."""

    mesh: Mapping[str, int] = field(hash=False)
    microbatches: int

    def only_saves_memory(self, other: Configuration) -> bool:
        """Whether this is `other` with more microbatches, and without a pipeline whose bubble these would reduce."""
        return self.mesh == other.mesh and self.mesh["pipe"] == 1 and self.microbatches > other.microbatches

    def __str__(self) -> str:
        return f"{sizes_text(self.mesh, ' ')}, {self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"


def candidates(
    num_ranks: int, batch_size: int | None, microbatches: Sequence[int] | None = None, axes: Iterable[str] = AXES
) -> Iterator[Configuration]:
    """All meshes of `num_ranks` ranks along `axes`, with the numbers of microbatches that divide the batch on them.

    Args:
        batch_size: rows of the global batch; None if no argument is split, so that it cannot be divided.
        microbatches: those to try; by default some multiples of the pipe axis.
    """
    wanted = set(axes)
    for sizes in configurations(num_ranks, AXES):
        if any(size > 1 and axis not in wanted for axis, size in sizes.items()):
            continue
        shards = sizes["data"] * sizes["z"]
        of_pipeline = [count * sizes["pipe"] for count in _MICROBATCHES_PER_RANK]
        for count in microbatches or (of_pipeline if sizes["pipe"] > 1 else _MICROBATCHES_WITHOUT_PIPELINE):
            parts = shards * count
            if parts == 1 or (batch_size is not None and batch_size % parts == 0):
                yield Configuration(sizes, count)
