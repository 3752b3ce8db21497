"""Solve a mixed-integer program by HiGHS: what its relaxation tells makes it small first.

The relaxation of a layout search is mostly whole, and then it is the solution. Else the best whole solution among the
variables that it uses, which is found at once, bounds the cost from above as the relaxation does from below, and a
variable whose reduced cost exceeds the difference is 0 in whatever is cheaper. A branch and bound of all variables
would in the end find the same, but takes several times as long to get at such a bound.

Where residuals and skip connections close many cycles, hundreds of variables are halves, and to prove what is cheapest
takes tens of seconds. Then a solution is good enough that costs a few percent more than the relaxation at most: costs
are estimates, and where both are known, what was found so has cost no more than a ten-thousandth above the least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

Vector = npt.NDArray[np.float64]

_WHOLE = 1e-6
"""How far from a whole number a variable of HiGHS may be."""

_GAP = 1e-4
"""How far, in proportion, the cost of a solution may be from the least."""

_MANY = 200
"""From how many fractions on a solution need not be proved the cheapest."""

_GOOD_ENOUGH = 0.03
"""How far, in proportion, the cost of such a solution may be from that of the relaxation."""

_SOLVED, _INFEASIBLE = 0, 2
"""Of scipy's statuses."""


@dataclass(frozen=True)
class Problem:
    """Minimise `costs` of variables in [0, 1], the `integral` ones of which are 0 or 1.

    Each row of `rows` times the variables is at least as much as `at_least` says, and exactly that where it is `equal`.
    """

    costs: Vector
    integral: npt.NDArray[np.bool_]
    rows: csr_array
    at_least: Vector
    equal: npt.NDArray[np.bool_]

    def solve(self) -> Vector | None:
        """The cheapest variables, or None if there are none that satisfy all rows."""
        relaxed = self._relaxed()
        if relaxed is None:
            return None
        least, found, reduced_costs = relaxed
        num_fractions = np.count_nonzero(np.minimum(found, 1 - found)[self.integral] > _WHOLE)
        if num_fractions == 0:
            return found
        used = self._whole(~self.integral | (found > _WHOLE))
        if used is None:
            return self._whole(np.ones_like(self.integral))
        bound = self.costs @ used
        if num_fractions > _MANY and bound - least <= _GOOD_ENOUGH * abs(bound):
            return used
        cheaper = self._whole(reduced_costs <= bound - least)
        return used if cheaper is None or self.costs @ cheaper > bound else cheaper

    def _relaxed(self) -> tuple[float, Vector, Vector] | None:
        """The least cost if no variable had to be whole, its variables, and what it would cost more to raise each."""
        equal = self.equal
        result = linprog(  # type: ignore[call-overload]  # the stubs know no sparse rows
            self.costs,
            A_ub=-self.rows[~equal],
            b_ub=-self.at_least[~equal],
            A_eq=self.rows[equal],
            b_eq=self.at_least[equal],
            bounds=(0, 1),
        )
        return (result.fun, result.x, result.lower.marginals) if _has_solution(result) else None

    def _whole(self, usable: npt.NDArray[np.bool_]) -> Vector | None:
        """The cheapest variables among those where all that are not `usable` are 0."""
        result = milp(
            self.costs,
            integrality=self.integral.astype(np.uint8),
            bounds=Bounds(0, usable.astype(np.float64)),
            constraints=self._constraint,
            options={"mip_rel_gap": _GAP},
        )
        return result.x if _has_solution(result) else None

    @cached_property
    def _constraint(self) -> LinearConstraint:
        return LinearConstraint(self.rows, self.at_least, np.where(self.equal, self.at_least, np.inf))


def _has_solution(result: Any) -> bool:
    assert result.status in (_SOLVED, _INFEASIBLE), f"the solver stopped early: {result.message}"
    return bool(result.status == _SOLVED)
