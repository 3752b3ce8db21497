"""What a sharding rule is: the strategies by which one op may run over one mesh axis, and the local op of each.

A rule is about one mesh axis at a time; several axes combine, as their placements never overlap in a dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import fx

from fxpar.ir.layout import Layout, Placement, Shard

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op as its rule sees it, in logical shapes.

    `inputs` are its tensor operands in the order of fx's `node.all_input_nodes` *with repeats*, as flattened
    from (args, kwargs); `outputs` has one shape per result, None where a result is not a tensor.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape | None, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op over one axis: a placement per tensor operand and per result.

    `divides_work`: the ranks share the arithmetic, rather than each repeating all of it.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    divides_work: bool = True


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand or result of an op, by position."""

    role: Literal["input", "output"]
    index: int


@dataclass(frozen=True, slots=True)
class LocalOp:
    """What a rule needs to emit the local form of an op: the layouts chosen for all axes, and the rank's coordinate.

    `args` and `kwargs` are the op's own, with every tensor operand replaced by its local node in `graph`.
    """

    call: OpCall
    graph: fx.Graph
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    coordinate: Mapping[str, int]

    def input_shape(self, index: int) -> Shape:
        """The local shape of tensor operand `index`."""
        return self.inputs[index].local_shape(self.coordinate)

    def output_shape(self, index: int = 0) -> Shape:
        """The local shape of result `index`, which must be a tensor."""
        layout = self.outputs[index]
        assert layout is not None, f"result {index} of {self.call.target} is no tensor"
        return layout.local_shape(self.coordinate)

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call to the local graph."""
        return self.graph.call_function(target, args, kwargs)


class Rule(Protocol):
    """The sharding rule of an op."""

    def extend(self, call: OpCall, operand: Operand, shard: Shard) -> Strategy | None:
        """The strategy in which `operand` is placed as `shard`, or None if the op cannot run so."""
        ...

    def linear(self, call: OpCall) -> Sequence[Strategy]:
        """The strategies that pass partial values from operands to results; they need no shard to start from."""
        ...

    def emit(self, local: LocalOp) -> fx.Node:
        """Append the local form of the op to `local.graph` and return its result."""
        ...
