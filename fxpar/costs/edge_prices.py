"""The cost of edges between stages on different hosts, as a function of their layouts on the stage that uses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port, StageBorder
from fxpar.resharding.pipeline import Crossing, stages_of
from fxpar.world.mesh import Mesh


class EdgePrices:
    """Prices for stage number `len(earlier)`: values come in from the earlier stages, and gradients go back to them.

    A price is the time of the resharding plan of the edge. So cost decides whether every rank receives all that it
    needs from other hosts, or one rank of its host receives it and a collective within the host does the rest.
    """

    def __init__(
        self, earlier: Sequence[StageBorder], mesh: Mesh, network: Network, placement: Sequence[int] | None = None
    ) -> None:
        self._mesh, self._network = mesh, network
        self._placement = range(len(earlier) + 1) if placement is None else placement
        self._here = len(earlier)
        self._makers: dict[Port, tuple[int, StageBorder]] = {}
        if len(set(mesh.hosts)) > 1:  # within one host, all transfers are equally cheap
            for stage, border in enumerate(earlier):
                for port in border.outputs:
                    self._makers.setdefault(port, (stage, border))
        self._known: dict[tuple[Port, bool, Layout], float] = {}

    def given(self, port: Port) -> str:
        """All that the prices of an edge depend on except its dtype, as text without names."""
        if port not in self._makers:
            return ""
        maker, border = self._makers[port]
        pipes = self._placement[maker], self._placement[self._here]
        places = sorted(set(pipes))
        order, hosts = [places.index(pipe) for pipe in pipes], stages_of(self._mesh, places).hosts
        return f"{border.outputs[port]} {border.tangents.get(port)} {order} {hosts} {self._network}"

    def value_us(self, port: Port, layout: Layout, dtype: torch.dtype) -> float:
        """The time to transfer the value of an edge into `layout`; 0 if the stage that makes it is not planned yet."""
        if port not in self._makers:
            return 0.0
        if (port, False, layout) not in self._known:
            maker, border = self._makers[port]
            pipes = self._placement[maker], self._placement[self._here]
            crossing = Crossing(port, False, maker, (self._here,), border.outputs[port], (layout,), dtype, pipes)
            self._known[port, False, layout] = crossing.time_us(self._mesh, self._network)
        return self._known[port, False, layout]

    def gradient_us(self, port: Port, layout: Layout, dtype: torch.dtype) -> float:
        """The time to transfer a gradient in `layout` back to the stage that makes the edge; likewise."""
        if port not in self._makers:
            return 0.0
        if (port, True, layout) not in self._known:
            maker, border = self._makers[port]
            pipes = self._placement[self._here], self._placement[maker]
            crossing = Crossing(port, True, self._here, (maker,), layout, (border.tangents[port],), dtype, pipes)
            self._known[port, True, layout] = crossing.time_us(self._mesh, self._network)
        return self._known[port, True, layout]
