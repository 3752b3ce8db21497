"""Estimate configurations by their graphs, those first that an analytic estimate finds fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fxpar.errors import FxparError
from fxpar.planner.coarse import AnalyticEstimate
from fxpar.planner.configuration import Configuration
from fxpar.planner.step_model import Estimate


@dataclass(slots=True)
class BestFirst:
    """A search among configurations, of which few can be estimated by their graphs.

    What a step computes besides matrix products, which analytic estimates need, is first taken to be nothing. Graphs
    show how much it is: most of all in narrow models. With too little, the bubbles of deep pipelines, which are a part
    of what is computed, seem cheap, and the reductions that they save expensive. So after each configuration the next
    is chosen anew.

    Args:
        analytic: of the configurations to choose from.
    """

    analytic: Mapping[Configuration, AnalyticEstimate]
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
            if self.estimates and begun - begin + longest > seconds:
                self.left_out |= dict.fromkeys(self._rest(), f"not looked at within {seconds:.0f} seconds")
                return
            configuration = self._rest()[0]
            say(f"{number} of {total}: {configuration}")
            try:
                self.estimates[configuration] = estimate(configuration)
            except FxparError as error:
                self.left_out[configuration] = str(error)
            longest = max(longest, time.monotonic() - begun)
        best = min(self.analytic, key=self._analytic_us)
        for each in self._rest():
            ratio = self._analytic_us(each) / self._analytic_us(best)
            self.left_out[each] = f"by its analytic estimate {ratio:.2f} times the time of {best}"

    def _rest(self) -> list[Configuration]:
        """What is left, the fastest first."""
        rest = [each for each in self.analytic if each not in self.estimates and each not in self.left_out]
        return sorted(rest, key=self._analytic_us)

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
