"""A captured forward, run on real values for one part of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from fxpar.ir.capture import Capture
from fxpar.ir.markers import is_marker
from fxpar.ir.stage import PortKind


class CapturedPart(fx.Interpreter):
    """Runs the graph of a capture on the values of its ports."""

    def __init__(self, capture: Capture, values: Mapping[tuple[PortKind, str], Tensor]) -> None:
        super().__init__(capture.module, garbage_collect_values=False)
        self._capture, self._values = capture, values

    def results(self) -> list[Tensor]:
        """What the forward computes, in its order."""
        self.run()
        return [self.env[node] for node in self._capture.results]

    def run_node(self, node: fx.Node) -> Any:
        """The value of a port at its source; nothing where arguments enter, and at markers of results."""
        port = self._capture.sources.get(node)
        if port is not None:
            return self._values[port.kind, port.name]
        if is_marker(node, "exit") or node.op in ("placeholder", "output"):
            return None
        return super().run_node(node)
