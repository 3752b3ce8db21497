"""The changes that would help most: each is estimated like the setup itself, and the best of each kind is proposed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxpar.errors import FxparError
from fxpar.explainer.neighbours import Change
from fxpar.explainer.setup import Setup
from fxpar.planner.analytic_estimate import AnalyticEstimate
from fxpar.planner.best_first import BestFirst
from fxpar.planner.configuration import Configuration
from fxpar.planner.step_model import Estimate
from fxpar.report.step_parts import StepPart, most_grown

LEAST_GAIN = 0.01
"""The share of a step below which a change is not proposed: predictions are not that precise."""

MOST_PROPOSED = 3


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change and its estimate.

    gain: the share of the step's time that it saves; negative if it takes longer.
    reason: what becomes faster by most.
    """

    change: Change
    estimate: Estimate
    gain: float
    reason: str

    @property
    def step_us(self) -> float:
        """The predicted step, with the optimizer's."""
        return whole_step_us(self.estimate)


def whole_step_us(estimate: Estimate) -> float:
    """The predicted step, with the optimizer's."""
    return estimate.step_us + estimate.optimizer_us


def whole_parts(estimate: Estimate) -> list[StepPart]:
    """The parts of a step, the optimizer's step among them; they add up to `whole_step_us`."""
    return [*estimate.parts.parts, StepPart("optimizer", "optimizer", estimate.optimizer_us)]


def proposal(change: Change, estimate: Estimate, given: Estimate) -> Proposal:
    """What a change brings, by its estimate and that of the given setup."""
    saved = most_grown(whole_parts(given), whole_parts(estimate))
    reason = f"{saved.label}: {-saved.time_us / 1e3:+,.2f} ms" if saved.time_us > 0 else ""
    return Proposal(change, estimate, 1 - whole_step_us(estimate) / whole_step_us(given), reason)


def most_helpful(tried: Iterable[Proposal], *, fits: bool) -> list[Proposal]:
    """The best change of each kind, the largest gain first, at most three.

    `fits`: whether the given setup fits into memory. If not, changes are proposed that do, though they cost time.
    """
    best: dict[str, Proposal] = {}
    for each in sorted(tried, key=lambda each: -each.gain):
        if each.gain >= LEAST_GAIN or not fits:
            best.setdefault(each.change.kind, each)
    return list(best.values())[:MOST_PROPOSED]


@dataclass(slots=True)
class Trial:
    """Tries changes of a setup until `seconds` have passed, and keeps those that fit into memory.

    Args:
        estimate: returns the estimate of a setup.
        given: that of the setup itself.
        begun: when `seconds` start.
    """

    estimate: Callable[[Setup], Estimate]
    given: Estimate
    budget_bytes: float
    seconds: float
    say: Callable[[str], None]
    tried: list[Proposal] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    def try_each(self, changes: Iterable[Change]) -> None:
        """Estimate each of the changes, in order."""
        for change in changes:
            if self._rest_s <= 0:
                self.left_out[change.text] = f"not estimated within {self.seconds:.0f} seconds"
                continue
            self.say(change.text)
            try:
                self._keep(change, self.estimate(change.setup))
            except FxparError as error:
                self.left_out[change.text] = str(error)

    def try_best_first(
        self, changes: Sequence[Change], analytic: Mapping[Configuration, AnalyticEstimate], own: Setup, most: int
    ) -> None:
        """Estimate up to `most` changes of the mesh, the best by their analytic estimates first.

        Args:
            analytic: the analytic estimates of the changed setups, and of the given one.
            own: the given setup.
        """
        by_configuration = {change.setup.configuration: change for change in changes}
        search = BestFirst(analytic, estimates={own.configuration: [self.given]})
        search.run(
            lambda configuration: [self.estimate(by_configuration[configuration].setup)],
            most,
            max(self._rest_s, 0.0),
            self.say,
        )
        for configuration, reason in search.left_out.items():
            self.left_out[by_configuration[configuration].text] = reason
        for configuration, (found,) in search.estimates.items():
            if configuration in by_configuration:
                self._keep(by_configuration[configuration], found)

    @property
    def _rest_s(self) -> float:
        return self.begun + self.seconds - time.monotonic()

    def _keep(self, change: Change, estimate: Estimate) -> None:
        if estimate.peak_bytes > self.budget_bytes:
            self.left_out[change.text] = f"it takes {estimate.peak_bytes / 2**30:,.3f} GiB of memory"
        else:
            self.tried.append(proposal(change, estimate, self.given))
