"""The rule of drawing random numbers by logical index: any dim may be sharded, since each rank draws its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxpar.layout import REPLICATE, Shard
from fxpar.rules.rule import LocalOp, OpCall, Operand, Strategy
from fxpar.tiles import logical_box


class UniformRule:
    """`fxpar::uniform`: the state is replicated, the result lies as asked."""

    def extend(self, call: OpCall, operand: Operand, shard: Shard) -> Strategy | None:
        """See `Rule.extend`."""
        return Strategy((REPLICATE,), (shard,)) if operand.role == "output" else None

    def linear(self, call: OpCall) -> Sequence[Strategy]:
        """See `Rule.linear`."""
        return ()

    def emit(self, local: LocalOp) -> fx.Node:
        """See `Rule.emit`."""
        layout = local.outputs[0]
        assert layout is not None, "uniform gives a tensor"
        box = logical_box(layout, local.coordinate)
        state, *_, span, stream = local.args
        shape = list(local.output_shape())
        return local.emit(local.call.target, state, shape, list(box.sizes), list(box.strides), box.offset, span, stream)
