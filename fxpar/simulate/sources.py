"""Where the costs of a simulation come from: flags, or files that compiles have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fxpar.errors import InvalidCostsError
from fxpar.schedule import Costs, Kind, chain, named_schedule, uniform_costs


class CostSource(Protocol):
    """Provides the costs of `num_stages` stages on `num_ranks` pipe ranks."""

    @property
    def num_stages(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def num_stages_for(self, name: str) -> int:
        """The number of stages that the schedule called `name` is to run."""
        ...

    def costs(self, placement: Sequence[int]) -> Costs:
        """The costs of stages on the ranks of `placement`.

        Raises InvalidCostsError if there are none.
        """
        ...


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """The costs of a compiled step, whose placement is fixed."""

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
    """The costs of a chain of stages, in microseconds: for each computation one for all stages, or one per stage.

    For schedules with one stage per rank, consecutive stages are merged into one per rank, for comparison.
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
