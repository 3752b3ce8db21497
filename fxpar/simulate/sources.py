"""Where the costs of a simulation come from: flags, or files that compiles have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fxpar.errors import InvalidCostsError
from fxpar.schedule import Costs, Kind, chain, named_schedule, uniform_costs


class CostSource(Protocol):
    """Has costs of `num_stages` stages on `num_ranks` pipe ranks."""

    @property
    def num_stages(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def num_stages_for(self, name: str) -> int:
        """How many stages the schedule called `name` is to run."""
        ...

    def costs(self, placement: Sequence[int]) -> Costs:
        """Of stages on the ranks of `placement`.

        Raises InvalidCostsError if there are none.
        """
        ...


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """Those of a compiled step, whose stages are where they are."""

    recorded: Costs

    @property
    def num_stages(self) -> int:
        return self.recorded.num_stages

    @property
    def num_ranks(self) -> int:
        return self.recorded.num_ranks

    def num_stages_for(self, name: str) -> int:
        return self.num_stages

    def costs(self, placement: Sequence[int]) -> Costs:
        if tuple(placement) != self.recorded.placement:
            problem = f"expected stages on ranks {tuple(placement)}, found the costs of {self.recorded.placement}"
            raise InvalidCostsError(problem, "compile the model for this schedule")
        return self.recorded


@dataclass(frozen=True, slots=True)
class GivenCosts:
    """Those of a chain of stages, in microseconds: of each computation for all stages alike, or stage by stage.

    Schedules with one stage per rank take as many stages together as make one per rank, to compare with.
    """

    num_stages: int
    num_ranks: int
    compute_us: Mapping[Kind, Sequence[float]]
    transfer_us: float

    def num_stages_for(self, name: str) -> int:
        return self.num_stages if named_schedule(name).shares_ranks else self.num_ranks

    def costs(self, placement: Sequence[int]) -> Costs:
        together = self.num_stages // len(placement)
        times = {
            kind: [sum(self._times(kind)[stage * together :][:together]) for stage in range(len(placement))]
            for kind in self.compute_us
        }
        return uniform_costs(placement, chain(len(placement)), times, self.transfer_us, self.transfer_us)

    def _times(self, kind: Kind) -> Sequence[float]:
        times = self.compute_us[kind]
        if len(times) not in (1, self.num_stages):
            problem = f"expected one time of {kind} or {self.num_stages}, found {len(times)}"
            raise InvalidCostsError(problem, "give one for all stages, or one for each, separated by commas")
        return times if len(times) == self.num_stages else [times[0]] * self.num_stages
