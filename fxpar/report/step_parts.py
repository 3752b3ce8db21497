"""What the time of a step is spent on, as reports and explanations show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

PIPE = "pipe"
"""The axis between stages."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of the step's time: a name for programs, and one for people."""

    name: str
    label: str
    time_us: float


@dataclass(frozen=True, slots=True)
class StepParts:
    """Microseconds of a step, which they add up to.

    compute_us: computation.
    exposed_us: by axis, in which nothing is computed for want of communication; "pipe" is that between stages.
    bubble_us: in which the schedule has nothing to do.
    replicated_us: more computation, which sharding would save at best; 0 if it is not told apart.
    """

    compute_us: float
    exposed_us: Mapping[str, float]
    bubble_us: float
    replicated_us: float = 0.0

    @property
    def total_us(self) -> float:
        """The time of the step."""
        return self.compute_us + self.replicated_us + sum(self.exposed_us.values()) + self.bubble_us

    @property
    def parts(self) -> list[StepPart]:
        """All parts, from what has to be done to what is lost."""
        replicated = StepPart("replicated", "replicated computation", self.replicated_us)
        exposed = [
            StepPart(f"exposed_{axis}", f"exposed communication over {axis}", time_us)
            for axis, time_us in self.exposed_us.items()
        ]
        return [
            StepPart("compute", "computation", self.compute_us),
            *([replicated] if self.replicated_us else []),
            *exposed,
            StepPart("bubble", "bubble", self.bubble_us),
        ]

    def share(self, time_us: float) -> float:
        """A time as a share of the step."""
        return time_us / self.total_us if self.total_us else 0.0


def most_grown(parts: Iterable[StepPart], others: Iterable[StepPart]) -> StepPart:
    """The part that takes most more time among `parts` than among `others`, with the difference as its time."""
    own, other = {part.name: part for part in parts}, {part.name: part for part in others}
    grown = [
        replace(part, time_us=_time_us(own, name) - _time_us(other, name)) for name, part in {**other, **own}.items()
    ]
    return max(grown, key=lambda part: part.time_us)


def _time_us(parts: Mapping[str, StepPart], name: str) -> float:
    return parts[name].time_us if name in parts else 0.0
