"""Estimate configurations by their graphs, those first that an analytic estimate finds fastest."""

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
    """A search among configurations, of which few can be estimated by their graphs.

    What a step computes besides matrix products, which analytic estimates need, is first taken to be nothing. Graphs
    show how much it is: most of all in narrow models. With too little, the bubbles of deep pipelines, which are a part
    of what is computed, seem cheap, and the reductions that they save expensive. So after each configuration the next
    is chosen anew. One that only saves memory is a choice when those with fewer microbatches take too much.

    Args:
        analytic: of the configurations to choose from.
        memory_bytes: what a rank may take; None: all are choices from the start.
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
        """Estimate `most` by their graphs, by every schedule; one at least, and none that would end after `seconds`."""
        begin, longest = time.monotonic(), 0.0
        total = min(most, len(self.analytic))
        for number in range(1, total + 1):
            begun = time.monotonic()
            choices = self._choices()
            if not choices:
                break
            if self.estimates and begun - begin + longest > seconds:
                self.left_out |= dict.fromkeys(self._rest(), f"not looked at within {seconds:.0f} seconds")
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
        """What is left, the fastest first."""
        rest = [each for each in self.analytic if each not in self.estimates and each not in self.left_out]
        return sorted(rest, key=self._analytic_us)

    def _choices(self) -> list[Configuration]:
        """Those of what is left that may be the best, the fastest first."""
        rest, budget = self._rest(), self.memory_bytes
        if budget is None:
            return rest
        fitting = [each for each, found in self.estimates.items() if any(e.peak_bytes <= budget for e in found)]
        return [each for each in rest if not any(each.only_saves_memory(fewer) for fewer in (*fitting, *rest))]

    def _analytic_us(self, configuration: Configuration) -> float:
        return self.analytic[configuration].step_us(self._other_us)

    @property
    def _other_us(self) -> float:
        """The least that graphs have shown: others compute more because their ranks share the work unevenly."""
        shown = (
            self.analytic[configuration].other_us(estimate.compute_us)
            for configuration, estimates in self.estimates.items()
            for estimate in estimates
        )
        return min(shown, default=0.0)
