"""Search layouts on one rank, for all that would find the same: a deep model's search takes its processor seconds."""

from __future__ import annotations

from fxpar.costs.dataflow import Operation
from fxpar.ir import node_meta
from fxpar.layouts.pins import Pin
from fxpar.layouts.search import Chosen, Search
from fxpar.world.compute_once import once


def search_once(search: Search) -> Chosen:
    """As `search.run()`, which one rank calls of all that search the same."""
    return once(_question(search), search.run) if search.sizes else search.run()


def _question(search: Search) -> str:
    """All that the search depends on."""
    given = (str(search.mesh), search.mesh.hosts, search.prices, search.microbatches, search.edges.given)
    operations = [_described(operation, search.pins.get(operation.node)) for operation in search.program]
    return "\n".join(["layouts", *map(str, given), *operations])


def _described(operation: Operation, pin: Pin | None) -> str:
    operands = [(value.node.name, value.result) for value in operation.operands]
    side = node_meta.is_backward(operation.node)
    return f"{operation.node.name} {operation.signature} {operands} {side} {operation.border} {operation.port} {pin}"
