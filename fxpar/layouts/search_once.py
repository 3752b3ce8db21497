"""Search layouts on one rank, for all ranks that would find the same: for a deep model it takes seconds of CPU time."""

from __future__ import annotations

from fxpar.costs.dataflow import Operation
from fxpar.ir import node_meta
from fxpar.layouts.pins import Pin
from fxpar.layouts.search import Chosen, Search
from fxpar.world.compute_once import compute_once


def search_once(search: Search) -> Chosen:
    """The result of `search.run()`, which only one of the ranks with the same search calls."""
    return compute_once(_question(search), search.run) if search.sizes else search.run()


def _question(search: Search) -> str:
    """All that the search depends on, as text."""
    given = (str(search.mesh), search.mesh.hosts, search.prices, search.microbatches, search.edges.given)
    operations = [_described(operation, search.pins.get(operation.node)) for operation in search.program]
    return "\n".join(["layouts", *map(str, given), *operations])


def _described(operation: Operation, pin: Pin | None) -> str:
    operands = [(value.node.name, value.result) for value in operation.operands]
    side = node_meta.is_backward(operation.node)
    return f"{operation.node.name} {operation.signature} {operands} {side} {operation.border} {operation.port} {pin}"
