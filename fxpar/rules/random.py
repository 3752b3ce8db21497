"""The local form of drawing random numbers by logical index: each rank draws those of its own shard."""

from __future__ import annotations

from torch import fx

from fxpar.ir.tiles import logical_box
from fxpar.rules.rule import LocalOp


def emit_uniform(local: LocalOp) -> fx.Node:
    """`fxpar::uniform` of this rank's shard."""
    (layout,) = local.outputs
    assert layout is not None, "uniform returns a tensor"
    box = logical_box(layout, local.coordinate)
    stream, *_, span = local.args
    shape = list(local.output_shape())
    return local.emit(local.call.target, stream, shape, list(box.sizes), list(box.strides), box.offset, span)
