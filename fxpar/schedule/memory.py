"""The memory of a step: the figures of a stage, and the peak of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from fxpar.errors import MemoryBudgetError
from fxpar.schedule.action import Kind

Part: TypeAlias = Literal["parameters", "gradients", "optimizer", "saved", "received", "made", "results", "working"]
"""What memory is used for. Values of edges that are saved for the backward are "saved", whichever stage made them."""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one of its ranks; what exists per microbatch is given for one.

    parameters, optimizer: present all the time.
    gradients: sums over microbatches, from the first backward on; none are assumed to remain from the previous step.
    terms: gradients of parameters that each backward, or W, allocates; the first ones become the sums.
    saved_for_inputs: made by F and kept until B, or until I if the backward is split.
    saved_for_weights: made by F and kept until B, or until W.
    carried: made by I and kept until W.
    results: made by F and kept to the end of the step.
    values, gradients_of: by edge that this stage makes, the bytes of the value, and of the gradient that comes back.
    read, returned: by edge that this stage reads, the bytes of the value, and of the gradient that it sends back.
    values_until, read_until: edges made or read whose memory is itself saved, with the action that needs it last: "I"
        or "W". (A whole backward needs all until B.)
    gradients_of_until, returned_until: edges whose gradient, received or returned, is itself carried until W.
    working: by kind of action, its peak while it runs, beyond its arguments and results; `terms` are included.

    No byte is in two other figures: edges in `*_until` count in `values`, `read`, `gradients_of` and `returned` alone.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    saved_for_inputs: int = 0
    saved_for_weights: int = 0
    carried: int = 0
    results: int = 0
    values: Mapping[str, int] = field(default_factory=dict)
    gradients_of: Mapping[str, int] = field(default_factory=dict)
    read: Mapping[str, int] = field(default_factory=dict)
    returned: Mapping[str, int] = field(default_factory=dict)
    values_until: Mapping[str, Kind] = field(default_factory=dict)
    read_until: Mapping[str, Kind] = field(default_factory=dict)
    gradients_of_until: frozenset[str] = frozenset()
    returned_until: frozenset[str] = frozenset()
    working: Mapping[Kind, int] = field(default_factory=dict)
    terms: int = 0

    @property
    def without_backward(self) -> StageMemory:
        """That of the same forward in a step without backwards, which drops what is saved when the forward ends."""
        working = self.working.get("F", 0) + self.saved_for_inputs + self.saved_for_weights
        return replace(self, saved_for_inputs=0, saved_for_weights=0, working={"F": working})


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak memory of a rank's program, and where it is; prints as a row under `MEMORY_HEADER`.

    `instruction`, at `position` of the program, is the first with `peak_bytes`, and `parts` is what they are used for.
    saved_peak_bytes: the peak of what is saved for the backward, which may be at another instruction.
    """

    rank: int
    peak_bytes: int
    saved_peak_bytes: int
    position: int
    instruction: str
    parts: Mapping[Part, int]

    def __str__(self) -> str:
        figures = [self.peak_bytes, self.saved_peak_bytes, *(self.parts[part] for part in PARTS)]
        return f"{self.rank:>4}" + "".join(f"{_mib(figure):>11}" for figure in figures) + f"  {self.instruction}"


MEMORY_HEADER = "rank" + "".join(f"{title:>11}" for title in ("peak MiB", "peak saved", *PARTS)) + "  peak at"
"""The header of a table of `RankMemory`: the peaks, then the parts of `peak_bytes`."""


def check_memory(peaks: Sequence[RankMemory], budget_bytes: float) -> None:
    """Raise MemoryBudgetError for the rank whose program needs most, if that is more than `budget_bytes`."""
    worst = max(peaks, key=lambda peak: peak.peak_bytes)
    if worst.peak_bytes > budget_bytes:
        parts = ", ".join(f"{part} {_mib(worst.parts[part])}" for part in PARTS if worst.parts[part])
        where = f"rank {worst.rank}, instruction {worst.position}: {worst.instruction}"
        raise MemoryBudgetError(_mib(worst.peak_bytes), _mib(budget_bytes), where, parts)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"
