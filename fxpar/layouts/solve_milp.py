"""Solve a mixed-integer program with HiGHS, after its linear relaxation has made it small.

The relaxation of a layout search is mostly integral, and then it is the solution. Else the best integral solution
among the variables that are not 0 in the relaxation, which is found quickly, bounds the cost from above, as the
relaxation does from below. A variable whose reduced cost exceeds the difference is 0 in every cheaper solution. Branch
and bound over all variables would find the same in the end, but takes several times as long to reach such a bound.

Where residuals and skip connections close many cycles, hundreds of variables are halves, and proving a solution
optimal takes tens of seconds. Then a solution that costs at most a few percent more than the relaxation is accepted:
costs are estimates, and where the optimum is known, such solutions cost at most 0.01% more. Where gradients of
gradients do so as well, the relaxation costs a third less than any solution, and branches prove nothing in as many
seconds: then the search for a cheaper solution ends at the root of the tree.
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
"""How far from an integer a variable of HiGHS may be."""

_GAP = 1e-4
"""The relative difference between the cost of a solution and the optimum that HiGHS may leave."""

_MANY = 200
"""With more fractional variables than this, a solution need not be proved optimal."""

_GOOD_ENOUGH = 0.03
"""The relative difference that is accepted between the cost of such a solution and that of the relaxation."""

_SOLVED, _INFEASIBLE, _LIMIT = 0, 2, 4
"""Status codes of scipy's solvers; the last one is that of a limit on nodes."""


@dataclass(frozen=True)
class MilpProblem:
    """Minimise `costs` of variables in [0, 1], the `integral` ones of which are 0 or 1.

    Each row of `rows` times the variables is at least its entry of `at_least`, and exactly that where `equal`.
    """

    costs: Vector
    integral: npt.NDArray[np.bool_]
    rows: csr_array
    at_least: Vector
    equal: npt.NDArray[np.bool_]

    def solve(self) -> Vector | None:
        """The variables of a cheapest solution, or None if no values satisfy all rows."""
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
        is_hard = num_fractions > _MANY
        if is_hard and bound - least <= _GOOD_ENOUGH * abs(bound):
            return used
        cheaper = self._whole(reduced_costs <= bound - least, branches=not is_hard)
        return used if cheaper is None or self.costs @ cheaper > bound else cheaper

    def _relaxed(self) -> tuple[float, Vector, Vector] | None:
        """The optimum of the linear relaxation, its variables, and their reduced costs; None if infeasible."""
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

    def _whole(self, usable: npt.NDArray[np.bool_], *, branches: bool = True) -> Vector | None:
        """The cheapest integral solution in which all variables that are not `usable` are 0; None if infeasible.

        Without `branches`, the cheapest that is found by cuts and heuristics alone; None if there is none.
        """
        result = milp(
            self.costs,
            integrality=self.integral.astype(np.uint8),
            bounds=Bounds(0, usable.astype(np.float64)),
            constraints=self._constraint,
            options={"mip_rel_gap": _GAP} if branches else {"mip_rel_gap": _GAP, "node_limit": 1},
        )
        return result.x if _has_solution(result) else None

    @cached_property
    def _constraint(self) -> LinearConstraint:
        return LinearConstraint(self.rows, self.at_least, np.where(self.equal, self.at_least, np.inf))


def _has_solution(result: Any) -> bool:
    assert result.status in (_SOLVED, _INFEASIBLE, _LIMIT), f"the solver stopped early: {result.message}"
    return result.x is not None
