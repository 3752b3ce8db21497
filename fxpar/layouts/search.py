"""Choose layouts along several axes: one axis is solved at a time, with the others fixed; the cheapest result is kept.

Every order of the axes is tried for one round; the order that is cheapest then is continued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import TypeVar

from torch import fx

from fxpar.costs.dataflow import Operation
from fxpar.costs.edge_prices import EdgePrices
from fxpar.costs.prices import Prices
from fxpar.errors import InfeasibleLayoutError
from fxpar.layouts.border_prices import BorderPrices
from fxpar.layouts.choose import Axis
from fxpar.layouts.pins import Pin
from fxpar.layouts.solve_axis import solve_axis
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.layouts.total_price import total_us
from fxpar.layouts.weights import Wanted, weights_of_products
from fxpar.rules.rule import Strategy
from fxpar.world.mesh import Mesh

T = TypeVar("T")

Chosen = Mapping[str, Sequence[Strategy]]
"""For each automatic axis of several ranks: the strategies of all operations along it."""

AUTOMATIC_AXES = ("x", "y")
"""The axes over which the compiler chooses layouts, in the order that is tried first."""

ROUNDS = 2
"""How often each axis is solved in an order: at first with only those before it fixed, then with all others fixed."""


@dataclass(frozen=True)
class Search:
    """The search for the layouts of a program: its constraints and its prices."""

    program: Sequence[Operation]
    pins: Mapping[fx.Node, Pin]
    mesh: Mesh
    prices: Prices
    microbatches: int
    edges: EdgePrices

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The axes to search along, with their sizes."""
        return {axis: self.mesh.sizes[axis] for axis in AUTOMATIC_AXES if self.mesh.sizes[axis] > 1}

    @cached_property
    def _weights(self) -> Sequence[fx.Node]:
        return weights_of_products(self.program)

    def run(self) -> Chosen:
        """The cheapest layouts that were found.

        Raises:
            InfeasibleLayoutError: the pins cannot all be met.
        """
        if not self.sizes:
            return {}
        started: list[tuple[_Found, Iterator[_Found]]] = []
        refused: list[InfeasibleLayoutError] = []
        for order in self._orders():
            rounds = self._in_order(order)
            try:
                started.append((next(rounds), rounds))
            except InfeasibleLayoutError as error:
                refused.append(error)
        if not started:
            raise refused[0]
        first, later = _cheapest(started, lambda start: start[0].us)
        return _cheapest([first, *later], lambda found: found.us).chosen

    def _orders(self) -> list[tuple[str, ...]]:
        """The orders in which to solve the axes; only one if the axes are interchangeable."""
        orders = list(permutations(self.sizes))
        kinds = {(size, self.prices.links[axis]) for axis, size in self.sizes.items()}
        named = any(pin.shards for pin in self.pins.values())
        alike = len(kinds) == 1 and not named and len(set(self.mesh.hosts)) == 1
        return orders[:1] if alike else orders

    def _in_order(self, order: Sequence[str]) -> Iterator[_Found]:
        """The result of each round that changed anything, when the axes are solved in this order."""
        wanted = {axis: dict.fromkeys(self._weights, Wanted.OWN_DIM) for axis in order}
        chosen: dict[str, list[Strategy]] = {}
        solved_beside: dict[str, dict[str, list[Strategy]]] = {}
        for _ in range(ROUNDS):
            before = dict(chosen)
            for axis in order:
                others = {other: found for other, found in chosen.items() if other != axis}
                if solved_beside.get(axis) != others:  # with the same layouts fixed, the result is the same
                    chosen[axis] = solve_axis(self.program, self.pins, wanted[axis], self._axis(axis, others))
                    solved_beside[axis] = others
            if chosen != before:
                yield _Found(self, dict(chosen))

    def _axis(self, axis: str, others: Chosen) -> Axis:
        """The problem of `axis` with the strategies of `others` fixed."""
        solved, shared_by = SolvedAxes.of(self.program, others), self._shared_by(others)
        ahead = {other: size for other, size in self.sizes.items() if other not in (axis, *others)}
        return Axis(axis, self.sizes[axis], self.prices, self.microbatches, solved, shared_by, self.edges, ahead)

    def _shared_by(self, chosen: Chosen) -> list[int]:
        """How many ranks share each operation's work."""
        shared_by = [1] * len(self.program)
        for axis, strategies in chosen.items():
            parts = self.sizes[axis]
            shared_by = [n * parts if s.divides_work else n for n, s in zip(shared_by, strategies, strict=True)]
        return shared_by

    def total_us(self, chosen: Chosen) -> float:
        """The cost of a step whose operations have the `chosen` strategies."""
        solved, shared_by = SolvedAxes.of(self.program, chosen), self._shared_by(chosen)
        border = BorderPrices(self.prices, self.sizes, self.microbatches, self.edges)
        return total_us(self.program, solved, shared_by, self.prices, self.sizes, border)


@dataclass(frozen=True)
class _Found:
    """The strategies that a search chose."""

    search: Search
    chosen: Chosen

    @cached_property
    def us(self) -> float:
        """Their cost."""
        return self.search.total_us(self.chosen)


def _cheapest(found: Sequence[T], us: Callable[[T], float]) -> T:
    """The first of the cheapest. What there is one of has no need of a cost, which takes a tenth of the search."""
    return found[0] if len(found) == 1 else min(found, key=us)
