"""A mixed-integer linear program, built row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Term = tuple[int, float]
"""A variable and its coefficient."""


class IntegerProgram:
    """Minimise the cost of non-negative variables, at most 1 each, under linear rows.

    The same rows in the same order have the same solution: no time limit ends the search.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._at_least: list[float] = []
        self._equal: list[bool] = []

    def variable(self, cost: float = 0.0, *, integral: bool = False) -> int:
        """Add a variable in [0, 1]; `integral` ones are 0 or 1."""
        self._costs.append(cost)
        self._integral.append(integral)
        return len(self._costs) - 1

    def add_cost(self, variable: int, cost: float) -> None:
        """Make a variable more expensive."""
        self._costs[variable] += cost

    def equal(self, terms: Iterable[Term], value: float) -> None:
        """Add a row: the terms add up to `value`."""
        self._row(terms, value, equal=True)

    def at_least(self, terms: Iterable[Term], value: float) -> None:
        """Add a row: the terms add up to `value` or more."""
        self._row(terms, value, equal=False)

    def no_more_than(self, bounds: Iterable[int], variables: Iterable[int]) -> None:
        """Add a row: the `variables` add up to no more than the `bounds` do."""
        self.at_least([*((x, 1) for x in bounds), *((x, -1) for x in variables)], 0)

    def _row(self, terms: Iterable[Term], value: float, *, equal: bool) -> None:
        row = len(self._at_least)
        for column, coefficient in terms:
            self._rows.append(row)
            self._columns.append(column)
            self._coefficients.append(coefficient)
        self._at_least.append(value)
        self._equal.append(equal)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self._at_least), len(self._costs)

    def solve(self) -> Sequence[float] | None:
        """The variables of a cheapest solution, or None if no values satisfy all rows."""
        # Here, since scipy takes a third of a second to import, and most ranks find layouts that another one searched.
        from scipy.sparse import csr_array

        from fxpar.layouts.solve_milp import MilpProblem

        problem = MilpProblem(
            np.asarray(self._costs),
            np.asarray(self._integral, dtype=np.bool_),
            csr_array((self._coefficients, (self._rows, self._columns)), shape=self.size),
            np.asarray(self._at_least),
            np.asarray(self._equal, dtype=np.bool_),
        )
        solution = problem.solve()
        return None if solution is None else solution.tolist()
