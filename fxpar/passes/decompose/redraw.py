"""Replace a random op by `fxpar::uniform`, which draws by logical index, and arithmetic on it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import UnsupportedGraphError
from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.node_meta import set_origin, set_value, tensor, where
from fxpar.ir.replace_items import replace_items

aten = torch.ops.aten


class Streams:
    """The call of `fxpar::streams` at the start of a graph, which returns the streams of all its random ops."""

    def __init__(self, graph: fx.Graph, state: fx.Node, origin: fx.Node) -> None:
        self._graph, self._state, self._origin = graph, state, origin
        self._numbers: list[int] = []
        self._items: list[fx.Node] = []
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            self._call = graph.call_function(torch.ops.fxpar.streams.default)

    def add(self, number: int) -> fx.Node:
        """A new item of the call: the stream `number`."""
        with self._graph.inserting_after(self._items[-1] if self._items else self._call):
            item = self._graph.call_function(operator.getitem, (self._call, len(self._items)))
        self._numbers.append(number)
        self._items.append(item)
        with fake_mode_of(self._graph):
            (value,) = torch.ops.fxpar.streams(tensor(self._state), [number])
        self._note(item, value)
        return item

    def close(self) -> None:
        """Let the call return the streams that were added."""
        self._call.args = (self._state, self._numbers)
        self._note(self._call, [tensor(item) for item in self._items])

    def _note(self, node: fx.Node, value: Any) -> None:
        set_value(node, value)
        set_origin(node, self._origin, backward=False)


class Redraw:
    """Writes the replacement of one random op before it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, streams: Streams, number: int) -> None:
        self._graph, self._node, self._streams, self._number = graph, node, streams, number

    def replace(self) -> None:
        write = _WRITERS.get(self._node.target)
        if write is None:
            raise UnsupportedGraphError(
                f"{self._node.target} in {where(self._node)} draws random numbers in a way that is not "
                f"the same on every mesh: expected one of {', '.join(sorted(map(str, _WRITERS)))}; write it by these, "
                "or draw outside of the forward and pass the numbers as an argument"
            )
        # `generator`, among the keywords, is None: Dynamo traces no other.
        results = write(self, *self._node.args)
        if len(results) == 1:
            self._node.replace_all_uses_with(results[0])
        replace_items(self._node, results)

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = self._graph.call_function(target, args, kwargs)
        values = fx.map_arg(args, tensor)
        with fake_mode_of(self._graph):
            set_value(made, target(*values, **kwargs))
        set_origin(made, self._node, backward=False)
        return made

    def uniform(self, shape: Sequence[int]) -> fx.Node:
        """Another draw of this op, of logical `shape`."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        self._number += 1 << 24  # so that two draws of one op differ
        stream, size = self._streams.add(self._number), list(shape)
        return self.emit(torch.ops.fxpar.uniform.default, stream, size, size, strides, 0, math.prod(shape))

    def dropout(self, x: fx.Node, p: float, train: bool | None) -> tuple[fx.Node, fx.Node]:
        mask = self.emit(aten.ge.Scalar, self.uniform(tensor(x).shape), p)
        kept = self.emit(aten.mul.Tensor, x, mask)
        return self.emit(aten.mul.Tensor, kept, 1.0 / (1.0 - p) if p < 1.0 else 0.0), mask

    def bernoulli(self, x: fx.Node, p: float | None = None) -> tuple[fx.Node]:
        drawn = self.uniform(tensor(x).shape)
        below = self.emit(aten.lt.Tensor, drawn, x) if p is None else self.emit(aten.lt.Scalar, drawn, p)
        return (self._as_result(below),)

    def rand(self, *_: Any) -> tuple[fx.Node]:
        return (self._as_result(self._uniform_like_result()),)

    def randn(self, *_: Any) -> tuple[fx.Node]:
        return (self._as_result(self._standard_normal()),)

    def uniform_between(self, _: fx.Node, low: float = 0.0, high: float = 1.0) -> tuple[fx.Node]:
        spread = self.emit(aten.mul.Tensor, self._uniform_like_result(), high - low)
        return (self._as_result(self.emit(aten.add.Tensor, spread, low)),)

    def normal_like(self, _: fx.Node, mean: float = 0.0, std: float = 1.0) -> tuple[fx.Node]:
        return self.normal(mean, std)

    def normal(self, mean: fx.Node | float = 0.0, std: fx.Node | float = 1.0, *_: Any) -> tuple[fx.Node]:
        spread = self.emit(aten.mul.Tensor, self._standard_normal(), std)
        return (self._as_result(self.emit(aten.add.Tensor, spread, mean)),)

    def exponential(self, _: fx.Node, rate: float = 1.0) -> tuple[fx.Node]:
        """Always positive, so that its logarithm is finite."""
        positive = self.emit(aten.clamp_min.default, self._minus_log(), 2.0**-25)
        return (self._as_result(self.emit(aten.mul.Tensor, positive, 1.0 / rate)),)

    def integers_below(self, high: int, *_: Any) -> tuple[fx.Node]:
        return self.integers(0, high)

    def integers_like_below(self, _: fx.Node, high: int) -> tuple[fx.Node]:
        return self.integers(0, high)

    def integers_like(self, _: fx.Node, low: int, high: int) -> tuple[fx.Node]:
        return self.integers(low, high)

    def integers(self, low: int, high: int, *_: Any) -> tuple[fx.Node]:
        if high - low > 1 << 24:
            raise UnsupportedGraphError(
                f"{self._node.target} in {where(self._node)} draws from {high - low} integers: expected at most "
                f"{1 << 24}, as the random numbers that are the same on every mesh have 24 bits; draw from fewer, or "
                "outside of the forward"
            )
        scaled = self.emit(aten.mul.Tensor, self._uniform_like_result(), float(high - low))
        whole = self.emit(aten._to_copy.default, self.emit(aten.floor.default, scaled), dtype=torch.int64)
        return (self._as_result(self.emit(aten.add.Tensor, whole, low)),)

    def _uniform_like_result(self) -> fx.Node:
        return self.uniform(tensor(self._node).shape)

    def _minus_log(self) -> fx.Node:
        """-log(1 - u), which is finite."""
        return self.emit(
            aten.neg.default, self.emit(aten.log1p.default, self.emit(aten.neg.default, self._uniform_like_result()))
        )

    def _standard_normal(self) -> fx.Node:
        """The Box-Muller transform."""
        radius = self.emit(aten.sqrt.default, self.emit(aten.mul.Tensor, self._minus_log(), 2.0))
        turned = self.emit(aten.mul.Tensor, self._uniform_like_result(), 2.0 * math.pi)
        return self.emit(aten.mul.Tensor, radius, self.emit(aten.cos.default, turned))

    def _as_result(self, drawn: fx.Node) -> fx.Node:
        dtype = tensor(self._node).dtype
        return drawn if tensor(drawn).dtype == dtype else self.emit(aten._to_copy.default, drawn, dtype=dtype)


_WRITERS: dict[Any, Callable[..., tuple[fx.Node, ...]]] = {
    aten.native_dropout.default: Redraw.dropout,
    aten.bernoulli.default: Redraw.bernoulli,
    aten.bernoulli.p: Redraw.bernoulli,
    aten.rand.default: Redraw.rand,
    aten.rand.generator: Redraw.rand,
    aten.rand_like.default: Redraw.rand,
    aten.rand_like.generator: Redraw.rand,
    aten.randn.default: Redraw.randn,
    aten.randn.generator: Redraw.randn,
    aten.randn_like.default: Redraw.randn,
    aten.randn_like.generator: Redraw.randn,
    aten.uniform.default: Redraw.uniform_between,
    aten.normal_functional.default: Redraw.normal_like,
    aten.normal.float_float: Redraw.normal,
    aten.normal.float_Tensor: Redraw.normal,
    aten.normal.Tensor_float: Redraw.normal,
    aten.normal.Tensor_Tensor: Redraw.normal,
    aten.exponential.default: Redraw.exponential,
    aten.randint.default: Redraw.integers_below,
    aten.randint.generator: Redraw.integers_below,
    aten.randint.low: Redraw.integers,
    aten.randint.low_generator: Redraw.integers,
    aten.randint_like.default: Redraw.integers_like_below,
    aten.randint_like.low_dtype: Redraw.integers_like,
}
