"""The cost of changing a value's placement along one axis."""

from __future__ import annotations

from fxpar.costs.dataflow import Value
from fxpar.costs.prices import Prices
from fxpar.graph.redistribute import RedistributeKind, RedistributeStep, local_size
from fxpar.ir.layout import Layout, Partial, Placement
from fxpar.layouts.solved_axes import fits


class RedistributionPrices:
    """Prices redistributions along `axis` of `parts` ranks; equal ones are computed once.

    Partial sums are results of matrix products, whose columns the axes still to be solved will shard over `ahead`
    ranks.
    """

    def __init__(self, axis: str, parts: int, prices: Prices, ahead: int = 1) -> None:
        self._axis, self._parts, self._prices, self._ahead = axis, parts, prices, ahead
        self._steps: dict[tuple[Layout, Placement, Placement, int], tuple[RedistributeKind, float]] = {}
        self._sizes: dict[tuple[Layout, Placement], int] = {}

    def num_bytes(self, value: Value, layout: Layout, placement: Placement) -> int:
        """Bytes of the largest local shard of `value`: `placement` along this axis, `layout` along the others."""
        if (layout, placement) not in self._sizes:
            self._sizes[layout, placement] = local_size(layout.with_placement(self._axis, placement))
        return self._sizes[layout, placement] * value.tensor.element_size()

    def move(self, value: Value, layout: Layout, src: Placement, dst: Placement) -> tuple[RedistributeKind, float]:
        """The kind of redistribution from `src` to `dst`, with `layout` along the other axes, and its microseconds."""
        width = value.tensor.element_size()
        key = (layout, src, dst, width)
        if key not in self._steps:
            step = self._step(layout, src, dst)
            bytes_sent, bytes_kept = step.traffic(self._parts) * width, local_size(step.after) * width
            if isinstance(src, Partial):
                bytes_sent /= self._ahead
            self._steps[key] = step.kind, self._prices.move_us(step.kind, self._axis, bytes_sent, bytes_kept)
        return self._steps[key]

    def _step(self, layout: Layout, src: Placement, dst: Placement) -> RedistributeStep:
        if not fits(layout, dst):  # another axis has to be redistributed, too: priced as if it had not sharded
            layout = Layout(layout.shape)
        return RedistributeStep(
            self._axis, layout.with_placement(self._axis, src), layout.with_placement(self._axis, dst)
        )
