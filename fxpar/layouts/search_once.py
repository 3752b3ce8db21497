"""Search layouts on one rank, for all that would find the same: a deep model's search takes its processor seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from fxpar import annotate
from fxpar.layouts.dataflow import Operation
from fxpar.layouts.pins import Pin
from fxpar.layouts.search import AUTOMATIC_AXES, Chosen, search
from fxpar.mesh import Mesh
from fxpar.once import once
from fxpar.planner.edge_prices import EdgePrices
from fxpar.planner.prices import Prices


def search_once(
    program: Sequence[Operation],
    pins: Mapping[fx.Node, Pin],
    mesh: Mesh,
    prices: Prices,
    microbatches: int,
    edges: EdgePrices,
) -> Chosen:
    """As `search`, which is run by one rank of all that search the same."""
    if all(mesh.sizes[axis] == 1 for axis in AUTOMATIC_AXES):
        return {}
    given = (str(mesh), mesh.hosts, prices, microbatches, edges.given)
    operations = [_described(operation, pins.get(operation.node)) for operation in program]
    question = "\n".join(["layouts", *map(str, given), *operations])
    return once(question, lambda: search(program, pins, mesh, prices, microbatches, edges))


def _described(operation: Operation, pin: Pin | None) -> str:
    operands = [(value.node.name, value.result) for value in operation.operands]
    side = annotate.is_backward(operation.node)
    return f"{operation.node.name} {operation.signature} {operands} {side} {operation.border} {operation.port} {pin}"
