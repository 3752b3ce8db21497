"""Draw random numbers by logical index, so that they are the same on every mesh."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.annotate import program_order, set_origin, set_value, tensor, where
from fxpar.errors import UnsupportedGraphError
from fxpar.passes.local_graph import fake_mode_of
from fxpar.random import RANDOM_STATE
from fxpar.stage import JointGraph

aten = torch.ops.aten


def logical_random(joint: JointGraph) -> JointGraph:
    """Replace every random op by `fxpar::uniform` and arithmetic on it; `RANDOM_STATE` becomes an input, if any.

    Each op draws from its own stream, numbered by its place in the captured program, not in the stage.

    Before: `native_dropout = aten.native_dropout(x, 0.1, True)`
    After:  `streams = fxpar.streams(random, [...])`, `stream = streams[0]`
            `uniform = fxpar.uniform(stream, ...)`, `mask = aten.ge(uniform, 0.1)`, `mul = aten.mul(x, mask)`, ...

    Raises:
        UnsupportedGraphError: an op draws from a distribution that has no such form here.
    """
    drawing = [node for node in joint.module.graph.nodes if _is_random(node)]
    if not drawing:
        return joint
    streams = _Streams(joint.module.graph, _add_state(joint), drawing[0])
    uses: dict[int, int] = {}
    for node in drawing:
        order = program_order(node)
        uses[order] = uses.get(order, 0) + 1
        with joint.module.graph.inserting_before(node):
            _Redraw(joint.module.graph, node, streams, number=order * 64 + uses[order]).replace()
    streams.close()
    joint.module.graph.lint()
    joint.module.recompile()
    return replace(joint, inputs=(*joint.inputs, RANDOM_STATE))


def _is_random(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")  # attention kernels draw for their dropout alone
    dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(dropout != 0.0)


def _add_state(joint: JointGraph) -> fx.Node:
    """A placeholder after the other inputs, before the tangents."""
    placeholders = [node for node in joint.module.graph.nodes if node.op == "placeholder"]
    with fake_mode_of(joint.module.graph):
        value = torch.empty(1, 3, dtype=torch.int64)
    with joint.module.graph.inserting_after(placeholders[len(joint.inputs) - 1]):
        state = joint.module.graph.placeholder("random_state")
    set_value(state, value)
    return state


class _Streams:
    """The call that gives the streams of all ops of a graph, in front of them."""

    def __init__(self, graph: fx.Graph, state: fx.Node, origin: fx.Node) -> None:
        self._graph, self._state, self._origin = graph, state, origin
        self._numbers: list[int] = []
        self._items: list[fx.Node] = []
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            self._call = graph.call_function(torch.ops.fxpar.streams.default)

    def add(self, number: int) -> fx.Node:
        """The stream of that number."""
        with self._graph.inserting_after(self._items[-1] if self._items else self._call):
            item = self._graph.call_function(operator.getitem, (self._call, len(self._items)))
        self._numbers.append(number)
        self._items.append(item)
        with fake_mode_of(self._graph):
            (value,) = torch.ops.fxpar.streams(tensor(self._state), [number])
        self._note(item, value)
        return item

    def close(self) -> None:
        """Let the call give the streams that were added."""
        self._call.args = (self._state, self._numbers)
        self._note(self._call, [tensor(item) for item in self._items])

    def _note(self, node: fx.Node, value: Any) -> None:
        set_value(node, value)
        set_origin(node, self._origin, backward=False)


class _Redraw:
    """Writes the replacement of one random op in front of it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, streams: _Streams, number: int) -> None:
        self._graph, self._node, self._streams, self._number = graph, node, streams, number

    def replace(self) -> None:
        write = _REDRAWN.get(self._node.target)
        if write is None:
            raise UnsupportedGraphError(
                f"{self._node.target} in {where(self._node)} draws random numbers in a way that is not "
                f"the same on every mesh: expected one of {', '.join(sorted(map(str, _REDRAWN)))}; write it by these, "
                "or draw outside of the forward and pass the numbers as an argument"
            )
        # `generator`, among the keywords, is None: Dynamo traces no other.
        results = write(self, *self._node.args)
        if len(results) == 1:
            self._node.replace_all_uses_with(results[0])
        for user in list(self._node.users):
            index = user.args[1]  # each user takes one item of a tuple
            assert isinstance(index, int), f"{user} takes no item of {self._node}"
            user.replace_all_uses_with(results[index])
            self._graph.erase_node(user)
        self._graph.erase_node(self._node)

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
        """Box and Muller's transform."""
        radius = self.emit(aten.sqrt.default, self.emit(aten.mul.Tensor, self._minus_log(), 2.0))
        turned = self.emit(aten.mul.Tensor, self._uniform_like_result(), 2.0 * math.pi)
        return self.emit(aten.mul.Tensor, radius, self.emit(aten.cos.default, turned))

    def _as_result(self, drawn: fx.Node) -> fx.Node:
        dtype = tensor(self._node).dtype
        return drawn if tensor(drawn).dtype == dtype else self.emit(aten._to_copy.default, drawn, dtype=dtype)


_REDRAWN: dict[Any, Callable[..., tuple[fx.Node, ...]]] = {
    aten.native_dropout.default: _Redraw.dropout,
    aten.bernoulli.default: _Redraw.bernoulli,
    aten.bernoulli.p: _Redraw.bernoulli,
    aten.rand.default: _Redraw.rand,
    aten.rand.generator: _Redraw.rand,
    aten.rand_like.default: _Redraw.rand,
    aten.rand_like.generator: _Redraw.rand,
    aten.randn.default: _Redraw.randn,
    aten.randn.generator: _Redraw.randn,
    aten.randn_like.default: _Redraw.randn,
    aten.randn_like.generator: _Redraw.randn,
    aten.uniform.default: _Redraw.uniform_between,
    aten.normal_functional.default: _Redraw.normal_like,
    aten.normal.float_float: _Redraw.normal,
    aten.normal.float_Tensor: _Redraw.normal,
    aten.normal.Tensor_float: _Redraw.normal,
    aten.normal.Tensor_Tensor: _Redraw.normal,
    aten.exponential.default: _Redraw.exponential,
    aten.randint.default: _Redraw.integers_below,
    aten.randint.generator: _Redraw.integers_below,
    aten.randint.low: _Redraw.integers,
    aten.randint.low_generator: _Redraw.integers,
    aten.randint_like.default: _Redraw.integers_like_below,
    aten.randint_like.low_dtype: _Redraw.integers_like,
}
