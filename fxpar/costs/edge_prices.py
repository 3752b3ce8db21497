"""What edges between stages cost between hosts, by their layouts on the stage that uses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port, StageBorder
from fxpar.resharding.pipeline import Crossing
from fxpar.world.mesh import Mesh


class EdgePrices:
    """Prices for stage number `len(earlier)`: values come in from the earlier stages, and gradients go back to them.

    A price is the time of the plan by which the edge would move. So whether the parts that a rank needs all come from
    afar, or one rank of its host gets them and a collective inside the host does the rest, is decided by cost.
    """

    def __init__(
        self, earlier: Sequence[StageBorder], mesh: Mesh, network: Network, placement: Sequence[int] | None = None
    ) -> None:
        self._earlier, self._mesh, self._network = earlier, mesh, network
        self._placement = range(len(earlier) + 1) if placement is None else placement
        self._known: dict[Crossing, float] = {}

    @property
    def given(self) -> str:
        """All that the prices depend on but the mesh, as text."""
        return f"{self._earlier} {self._network} {list(self._placement)}"

    def value_us(self, port: Port, layout: Layout, dtype: torch.dtype) -> float:
        """The time in which the value of an edge gets into `layout`."""
        maker = self._maker(port)
        if maker is None:
            return 0.0
        source = self._earlier[maker].outputs[port]
        here = len(self._earlier)
        pipes = self._placement[maker], self._placement[here]
        return self._time_us(Crossing(port, False, maker, (here,), source, (layout,), dtype, pipes))

    def gradient_us(self, port: Port, layout: Layout, dtype: torch.dtype) -> float:
        """The time in which a gradient in `layout` gets back to where the edge was made."""
        maker = self._maker(port)
        if maker is None:
            return 0.0
        destination = self._earlier[maker].tangents[port]
        here = len(self._earlier)
        pipes = self._placement[here], self._placement[maker]
        return self._time_us(Crossing(port, True, here, (maker,), layout, (destination,), dtype, pipes))

    def _maker(self, port: Port) -> int | None:
        """The stage that makes an edge, where that is known and hosts lie between."""
        if len(set(self._mesh.hosts)) == 1:
            return None
        return next((stage for stage, border in enumerate(self._earlier) if port in border.outputs), None)

    def _time_us(self, crossing: Crossing) -> float:
        if crossing not in self._known:
            # The order in which transfers are made hardly matters for a comparison, so that the quick one will do.
            plan = crossing.planned(self._mesh, self._network, algorithm="balance").plan
            self._known[crossing] = plan.time_us(self._network)
        return self._known[crossing]
