"""The cost of edges between stages on different hosts, as a function of their layouts on the stage that uses them."""

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

    A price is the time of the resharding plan of the edge. So cost decides whether every rank receives all that it
    needs from other hosts, or one rank of its host receives it and a collective within the host does the rest.
    """

    def __init__(
        self, earlier: Sequence[StageBorder], mesh: Mesh, network: Network, placement: Sequence[int] | None = None
    ) -> None:
        self._earlier, self._mesh, self._network = earlier, mesh, network
        self._placement = range(len(earlier) + 1) if placement is None else placement
        self._known: dict[Crossing, float] = {}

    @property
    def given(self) -> str:
        """All that the prices depend on except the mesh, as text."""
        return f"{self._earlier} {self._network} {list(self._placement)}"

    def value_us(self, port: Port, layout: Layout, dtype: torch.dtype) -> float:
        """The time to transfer the value of an edge into `layout`."""
        maker = self._maker(port)
        if maker is None:
            return 0.0
        source = self._earlier[maker].outputs[port]
        here = len(self._earlier)
        pipes = self._placement[maker], self._placement[here]
        return self._time_us(Crossing(port, False, maker, (here,), source, (layout,), dtype, pipes))

    def gradient_us(self, port: Port, layout: Layout, dtype: torch.dtype) -> float:
        """The time to transfer a gradient in `layout` back to the stage that makes the edge."""
        maker = self._maker(port)
        if maker is None:
            return 0.0
        destination = self._earlier[maker].tangents[port]
        here = len(self._earlier)
        pipes = self._placement[here], self._placement[maker]
        return self._time_us(Crossing(port, True, here, (maker,), layout, (destination,), dtype, pipes))

    def _maker(self, port: Port) -> int | None:
        """The stage that makes an edge; None if it is not planned yet, or if the mesh has only one host."""
        if len(set(self._mesh.hosts)) == 1:
            return None
        return next((stage for stage, border in enumerate(self._earlier) if port in border.outputs), None)

    def _time_us(self, crossing: Crossing) -> float:
        if crossing not in self._known:
            # The order of transfers hardly matters for a comparison, so the quick algorithm is good enough.
            plan = crossing.planned(self._mesh, self._network, algorithm="balance").plan
            self._known[crossing] = plan.time_us(self._network)
        return self._known[crossing]
