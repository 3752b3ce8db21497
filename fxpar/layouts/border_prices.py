"""The cost of a value that enters or leaves a stage, as a function of its layout."""

from __future__ import annotations

from collections.abc import Mapping

from fxpar.costs.dataflow import Border, Operation, Value
from fxpar.costs.edge_prices import EdgePrices
from fxpar.costs.prices import Prices
from fxpar.graph.redistribute import RedistributeStep, local_size
from fxpar.ir.layout import REPLICATE, Layout, Partial
from fxpar.ir.stage import PortKind


class BorderPrices:
    """Prices of storage, of transfer from and to other stages, and of the reduction of gradients once per step.

    `sizes`: the axes along which partial gradients are still to be summed, with their sizes. One such sum serves all
    `microbatches`.
    """

    def __init__(self, prices: Prices, sizes: Mapping[str, int], microbatches: int, edges: EdgePrices) -> None:
        self._prices, self._sizes, self._microbatches, self._edges = prices, sizes, microbatches, edges

    def us(self, operation: Operation, value: Value, layout: Layout) -> float:
        """The cost in microseconds of `value`, which enters or leaves through the port `operation`; 0 for other ops."""
        if operation.port is None:
            return 0.0
        kind = operation.port.kind
        if operation.border is Border.INPUT and kind is PortKind.PARAMETER:
            return self._prices.stored_us_per_byte * _num_bytes(value, layout)
        if kind is PortKind.EDGE:
            return self._edge_us(operation, value, layout)
        return sum(self._reduction_us(value, layout, axis) for axis in self._sizes) / self._microbatches

    def _edge_us(self, operation: Operation, value: Value, layout: Layout) -> float:
        """The transfer time between hosts, if the other stage's layout is known, and that of this stage's shard."""
        assert operation.port is not None, "an edge has a port"
        edges, dtype = self._edges, value.tensor.dtype
        taken_us = _num_bytes(value, layout) / self._prices.edge_bytes_per_us
        match operation.border:
            case Border.INPUT:
                return taken_us + edges.value_us(operation.port, layout, dtype)
            case Border.TANGENT:
                return taken_us
            case Border.GRADIENT:
                return edges.gradient_us(operation.port, layout, dtype)
        return 0.0

    def _reduction_us(self, value: Value, layout: Layout, axis: str) -> float:
        """The time that reducing a partial gradient adds to the reduction of all gradients in buckets."""
        if not isinstance(layout.placement(axis), Partial):
            return 0.0
        sent = RedistributeStep(axis, layout, layout.with_placement(axis, REPLICATE)).traffic(self._sizes[axis])
        return self._prices.bucketed_us(axis, sent * value.tensor.element_size())


def _num_bytes(value: Value, layout: Layout) -> int:
    return local_size(layout) * value.tensor.element_size()
