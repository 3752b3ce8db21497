"""What it costs to change a value's placement along one axis."""

from __future__ import annotations

from fxpar.costs.dataflow import Value
from fxpar.costs.prices import Prices
from fxpar.graph.redistribute import RedistributeKind, RedistributeStep, local_size
from fxpar.ir.layout import Layout, Partial, Placement
from fxpar.layouts.solved_axes import fits


class RedistributionPrices:
    """Prices the moves along `axis` of `parts` ranks; identical moves are worked out once.

    Sums are results of products, whose columns the axes that are still to be solved will share among `ahead` ranks.
    """

    def __init__(self, axis: str, parts: int, prices: Prices, ahead: int = 1) -> None:
        self._axis, self._parts, self._prices, self._ahead = axis, parts, prices, ahead
        self._steps: dict[tuple[Layout, Placement, Placement, int], tuple[RedistributeKind, float]] = {}
        self._sizes: dict[tuple[Layout, Placement], int] = {}

    def num_bytes(self, value: Value, layout: Layout, placement: Placement) -> int:
        """Bytes of the largest local piece of `value`, placed so besides the other axes of `layout`."""
        if (layout, placement) not in self._sizes:
            self._sizes[layout, placement] = local_size(layout.with_placement(self._axis, placement))
        return self._sizes[layout, placement] * value.tensor.element_size()

    def move(self, value: Value, layout: Layout, src: Placement, dst: Placement) -> tuple[RedistributeKind, float]:
        """What moves `value` from `src` to `dst` besides the other axes of `layout`, and in how many microseconds."""
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
        if not fits(layout, dst):  # another axis moves out of the way, too: about as if it had not been there
            layout = Layout(layout.shape)
        return RedistributeStep(
            self._axis, layout.with_placement(self._axis, src), layout.with_placement(self._axis, dst)
        )
