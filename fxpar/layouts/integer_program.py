"""A mixed-integer linear program, written down row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Term = tuple[int, float]
"""A variable and its coefficient."""


class IntegerProgram:
    """Minimise the cost of non-negative variables, at most 1 each, under linear rows.

    The same rows in the same order give the same solution: the search is cut off by no clock.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def variable(self, cost: float = 0.0, *, integral: bool = False) -> int:
        """Add a variable in [0, 1]; `integral` ones are 0 or 1."""
        self._costs.append(cost)
        self._integral.append(integral)
        return len(self._costs) - 1

    def add_cost(self, variable: int, cost: float) -> None:
        """Make a variable dearer."""
        self._costs[variable] += cost

    def equal(self, terms: Iterable[Term], value: float) -> None:
        """The terms add up to `value`."""
        self._row(terms, value, value)

    def at_least(self, terms: Iterable[Term], value: float) -> None:
        """The terms add up to `value` or more."""
        self._row(terms, value, inf)

    def no_more_than(self, bounds: Iterable[int], variables: Iterable[int]) -> None:
        """The `variables` add up to no more than the `bounds` do."""
        self.at_least([*((x, 1) for x in bounds), *((x, -1) for x in variables)], 0)

    def _row(self, terms: Iterable[Term], lower: float, upper: float) -> None:
        row = len(self._lower)
        for column, coefficient in terms:
            self._rows.append(row)
            self._columns.append(column)
            self._coefficients.append(coefficient)
        self._lower.append(lower)
        self._upper.append(upper)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self._lower), len(self._costs)

    def solve(self) -> Sequence[float] | None:
        """The cheapest value of every variable, or None if no values satisfy all rows."""
        matrix = csr_array((self._coefficients, (self._rows, self._columns)), shape=self.size)
        result = milp(
            np.asarray(self._costs),
            integrality=np.asarray(self._integral, dtype=np.uint8),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.asarray(self._lower), np.asarray(self._upper)),
            options={"mip_rel_gap": 1e-4},
        )
        assert result.status in (0, 2), f"the solver stopped early: {result.message}"
        return None if result.x is None else [float(value) for value in result.x]
