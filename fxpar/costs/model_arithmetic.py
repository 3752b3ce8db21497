"""The arithmetic of a model as planned, which is what MFU counts: without what is computed again to save memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from fxpar.costs.op_cost import flops_of
from fxpar.costs.prices import Prices
from fxpar.ir.node_meta import is_backward, value
from fxpar.ir.stage import PlannedStage


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Floating-point operations of matrix products, and the time that they take on one rank at the cluster's rates."""

    flops: float = 0.0
    ideal_us: float = 0.0

    def __add__(self, other: Arithmetic) -> Arithmetic:
        return Arithmetic(self.flops + other.flops, self.ideal_us + other.ideal_us)

    def times(self, count: int) -> Arithmetic:
        """`count` times the same."""
        return Arithmetic(count * self.flops, count * self.ideal_us)


def model_arithmetic(stages: Sequence[PlannedStage], prices: Prices) -> tuple[Arithmetic, Arithmetic]:
    """That of the forwards of all stages for one microbatch of one batch shard, and that of their backwards."""
    forward, backward = Arithmetic(), Arithmetic()
    calls = (node for stage in stages for node in stage.joint.module.graph.nodes if node.op == "call_function")
    for node in calls:
        if is_backward(node):
            backward += _arithmetic_of(node, prices)
        else:
            forward += _arithmetic_of(node, prices)
    return forward, backward


def _arithmetic_of(node: fx.Node, prices: Prices) -> Arithmetic:
    flops = flops_of(node)
    if not flops:
        return Arithmetic()
    found = value(node)
    first = found if isinstance(found, Tensor) else next(each for each in found if isinstance(each, Tensor))
    return Arithmetic(flops, prices.arithmetic_us(flops, first.dtype))
