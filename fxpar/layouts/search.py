"""Lay values out along several axes: each is solved in turn, beside the others, and the cheapest of all is kept.

Every order of the axes is tried for a round; the one that is cheapest then goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from torch import fx

from fxpar.errors import InfeasibleLayoutError
from fxpar.layouts.beside import Beside
from fxpar.layouts.border_prices import BorderPrices
from fxpar.layouts.choose import Axis
from fxpar.layouts.dataflow import Operation
from fxpar.layouts.pins import Pin
from fxpar.layouts.solve_axis import solve_axis
from fxpar.layouts.total_price import total_us
from fxpar.layouts.weights import Wanted, weights_of_products
from fxpar.mesh import Mesh
from fxpar.planner.edge_prices import EdgePrices
from fxpar.planner.prices import Prices
from fxpar.rules.rule import Strategy

AUTOMATIC_AXES = ("x", "y")
"""The axes over which values are laid out by the compiler, in the order in which they are solved first."""

ROUNDS = 2
"""How often each axis is solved in an order: at first beside those before it, then beside all others."""


def search(
    program: Sequence[Operation],
    pins: Mapping[fx.Node, Pin],
    mesh: Mesh,
    prices: Prices,
    microbatches: int,
    edges: EdgePrices,
) -> Beside:
    """The cheapest layouts of everything that were found, along all automatic axes.

    Raises:
        InfeasibleLayoutError: the pins cannot all be met.
    """
    return _Search(program, pins, mesh, prices, microbatches, edges).run()


class _Found(NamedTuple):
    """Where everything lies, and what it costs in microseconds."""

    us: float
    beside: Beside


class _Search:
    """What the solutions along the axes have in common."""

    def __init__(
        self,
        program: Sequence[Operation],
        pins: Mapping[fx.Node, Pin],
        mesh: Mesh,
        prices: Prices,
        microbatches: int,
        edges: EdgePrices,
    ) -> None:
        self._program, self._pins, self._mesh = program, pins, mesh
        self._prices, self._microbatches, self._edges = prices, microbatches, edges
        self._weights = weights_of_products(program)
        self._sizes = {axis: mesh.sizes[axis] for axis in AUTOMATIC_AXES if mesh.sizes[axis] > 1}

    def run(self) -> Beside:
        if not self._sizes:
            return Beside()
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
        first, later = min(started, key=lambda start: start[0].us)
        return min([first, *later], key=lambda found: found.us).beside

    def _orders(self) -> list[tuple[str, ...]]:
        """The orders in which to solve the axes: one where nothing tells them apart, so that all find the same."""
        orders = list(permutations(self._sizes))
        kinds = {(size, self._prices.links[axis]) for axis, size in self._sizes.items()}
        named = any(pin.shards for pin in self._pins.values())
        alike = len(kinds) == 1 and not named and len(set(self._mesh.hosts)) == 1
        return orders[:1] if alike else orders

    def _in_order(self, order: Sequence[str]) -> Iterator[_Found]:
        """What is found in each round when the axes are solved in this order."""
        wanted = {axis: dict.fromkeys(self._weights, Wanted.OWN_DIM) for axis in order}
        chosen: dict[str, list[Strategy]] = {}
        solved_beside: dict[str, dict[str, list[Strategy]]] = {}
        for _ in range(ROUNDS):
            before = dict(chosen)
            for axis in order:
                others = {other: found for other, found in chosen.items() if other != axis}
                if solved_beside.get(axis) != others:  # beside the same, the same is found
                    chosen[axis] = solve_axis(self._program, self._pins, wanted[axis], self._axis(axis, others))
                    solved_beside[axis] = others
            if chosen != before:
                yield self._weighed(chosen)

    def _axis(self, axis: str, others: Mapping[str, Sequence[Strategy]]) -> Axis:
        """What is given when `axis` is solved beside `others`."""
        beside, shared_by = self._laid_out(others)
        ahead = {other: size for other, size in self._sizes.items() if other not in (axis, *others)}
        return Axis(axis, self._sizes[axis], self._prices, self._microbatches, beside, shared_by, self._edges, ahead)

    def _laid_out(self, chosen: Mapping[str, Sequence[Strategy]]) -> tuple[Beside, list[int]]:
        """The layouts along the chosen axes, and how many ranks share each operation's work."""
        beside, shared_by = Beside(), [1] * len(self._program)
        for axis, strategies in chosen.items():
            beside = beside.along(axis, self._program, strategies)
            parts = self._sizes[axis]
            shared_by = [n * parts if s.divides_work else n for n, s in zip(shared_by, strategies, strict=True)]
        return beside, shared_by

    def _weighed(self, chosen: Mapping[str, Sequence[Strategy]]) -> _Found:
        beside, shared_by = self._laid_out(chosen)
        border = BorderPrices(self._prices, self._sizes, self._microbatches, self._edges)
        return _Found(total_us(self._program, beside, shared_by, self._prices, self._sizes, border), beside)
