"""Estimate configurations from graphs, in the order of their analytic estimates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fxpar.errors import FxparError
from fxpar.planner.analytic_estimate import AnalyticEstimate
from fxpar.planner.configuration import Configuration
from fxpar.planner.step_model import Estimate


@dataclass(slots=True)
class BestFirst:
    """A search among configurations, only some of which can be estimated from graphs.

    Analytic estimates need the time of all operations besides matrix products, which is first assumed to be 0. Graphs
    show how long it is: in narrow models it matters most. If it is too small, the bubbles of deep pipelines, which are
    proportional to computation, seem cheap, and the reductions that they save expensive. So the next configuration is
    chosen anew after each graph estimate. One that only saves memory is a choice if those with fewer microbatches do
    not fit.

    Args:
        analytic: the analytic estimates of the configurations to choose from.
        memory_bytes: the memory limit of a rank; None: all configurations are choices from the start.
    """

    analytic: Mapping[Configuration, AnalyticEstimate]
    memory_bytes: float | None = None
    estimates: dict[Configuration, list[Estimate]] = field(default_factory=dict)
    left_out: dict[Configuration, str] = field(default_factory=dict)

    def run(
        self,
        estimate: Callable[[Configuration], list[Estimate]],
        most: int,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """Estimate up to `most` from graphs, with every schedule; one at least, none to end after `seconds`."""
        begin, longest = time.monotonic(), 0.0
        total = min(most, len(self.analytic))
        for number in range(1, total + 1):
            begun = time.monotonic()
            choices = self._choices()
            if not choices:
                break
            if self.estimates and begun - begin + longest > seconds:
                self.left_out |= dict.fromkeys(self._rest(), f"not estimated from graphs within {seconds:.0f} seconds")
                return
            configuration = choices[0]
            say(f"{number} of {total}: {configuration}")
            try:
                self.estimates[configuration] = estimate(configuration)
            except FxparError as error:
                self.left_out[configuration] = str(error)
            longest = max(longest, time.monotonic() - begun)
        best = min(self.analytic, key=self._analytic_us)
        for each in self._rest():
            if any(each.only_saves_memory(fewer) for fewer in self.estimates):
                self.left_out[each] = "it fits with fewer microbatches, which take no more time"
                continue
            ratio = self._analytic_us(each) / self._analytic_us(best)
            self.left_out[each] = f"by its analytic estimate {ratio:.2f} times the time of {best}"

    def _rest(self) -> list[Configuration]:
        """The configurations that are left, the fastest first."""
        rest = [each for each in self.analytic if each not in self.estimates and each not in self.left_out]
        return sorted(rest, key=self._analytic_us)

    def _choices(self) -> list[Configuration]:
        """The configurations that are left and may be the best, the fastest first."""
        rest, budget = self._rest(), self.memory_bytes
        if budget is None:
            return rest
        fitting = [each for each, found in self.estimates.items() if any(e.peak_bytes <= budget for e in found)]
        return [each for each in rest if not any(each.only_saves_memory(fewer) for fewer in (*fitting, *rest))]

    def _analytic_us(self, configuration: Configuration) -> float:
        return self.analytic[configuration].step_us(self._other_us)

    @property
    def _other_us(self) -> float:
        """The smallest value that graphs have shown: it is larger where ranks share the work unevenly."""
        shown = (
            self.analytic[configuration].other_us(estimate.compute_us)
            for configuration, estimates in self.estimates.items()
            for estimate in estimates
        )
        return min(shown, default=0.0)
