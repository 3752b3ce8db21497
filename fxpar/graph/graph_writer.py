"""Write nodes of local tensors, each with its fake value, its forward or backward tag and its origin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from fxpar._torch.compiler import FakeTensor, FakeTensorMode
from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar.ir.node_meta import is_backward, set_origin, set_value, tensor, value
from fxpar.ir.strides import inverse, lies_in_order, stride_order

aten = torch.ops.aten


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the fake values of `graph` were made under."""
    values = (value(node) for node in graph.nodes if node.op != "output")
    mode: FakeTensorMode = next(found.fake_mode for found in values if isinstance(found, FakeTensor))
    return mode


class GraphWriter(ABC):
    """Writes calls of ATen ops into a graph, except for those that would change nothing."""

    @abstractmethod
    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call, with its value, tag and origin."""

    def view(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`node` in another shape, made contiguous first."""
        if tuple(tensor(node).shape) == tuple(shape):
            return node
        return self.call(aten.view.default, self.contiguous(node), list(shape))

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """Dim `order[i]` of `node` becomes dim i."""
        if list(order) == sorted(order):
            return node
        return self.call(aten.permute.default, node, list(order))

    def contiguous(self, node: fx.Node) -> fx.Node:
        """`node`, or a copy in row-major order."""
        if tensor(node).is_contiguous():
            return node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def narrow(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        """Elements start to stop of `dim`."""
        if (start, stop) == (0, tensor(node).shape[dim]):
            return node
        return self.call(aten.slice.Tensor, node, dim, start, stop)

    def pad(self, node: fx.Node, dim: int, size: int) -> fx.Node:
        """`node` with zeros after the end of `dim`, up to `size`."""
        shape = tensor(node).shape
        if shape[dim] == size:
            return node
        margins = [0, 0] * (len(shape) - 1 - dim) + [0, size - shape[dim]]
        return self.call(aten.constant_pad_nd.default, node, margins, 0)

    def in_order(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """`node`, or a dense copy whose stride order is `order`."""
        if lies_in_order(tensor(node), order):
            return node
        return self.permute(self.contiguous(self.permute(node, order)), inverse(order))


class _NamedGraph(ConcreteGraph):
    """A graph whose calls are named after their op (`mm`), not its overload (`mm_default`)."""

    def create_node(
        self,
        op: str,
        target: Target,
        args: tuple[Argument, ...] | None = None,
        kwargs: dict[str, Argument] | None = None,
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        return super().create_node(op, target, args, kwargs, name or _name_of(target), type_expr)


def _name_of(target: object) -> str | None:
    """The name for nodes that call the op `target`; None if it is no op."""
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else None


class WriterInPlace(GraphWriter):
    """Writes into an existing graph at its insert point; new nodes get the origin and the tag of the node `like`."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph, self._like = graph, like

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call."""
        node = self.graph.create_node("call_function", target, args, kwargs, _name_of(target))
        given, named = fx.map_arg((args, kwargs), value)
        with fake_mode_of(self.graph):
            set_value(node, target(*given, **named))
        set_origin(node, self._like, backward=is_backward(self._like))
        return node


class LocalGraph(GraphWriter):
    """A graph under construction. Every call runs immediately under the fake mode, so that its value is known."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph: fx.Graph = _NamedGraph()
        self._mode = mode
        self._origin: tuple[fx.Node, bool] | None = None
        self._completed = 0

    @contextmanager
    def on_behalf_of(self, source: fx.Node, *, backward: bool) -> Iterator[None]:
        """New nodes inside are made for `source`, a node of the logical graph, and are tagged forward or backward."""
        before = self._origin
        self._origin = (source, backward)
        yield
        self._origin = before

    def placeholder(self, name: str, shape: Sequence[int], like: Tensor) -> fx.Node:
        """A dense input of `shape` that has the stride order of `like`."""
        order = stride_order(like)
        with self._mode:
            dense = torch.empty([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
            local = dense.permute(inverse(order))
        return self.given(self.graph.placeholder(name), local)

    def given(self, node: fx.Node, found: Any) -> fx.Node:
        """Record the value of a node of `graph` that cannot be run."""
        set_value(node, found)
        self.complete()
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call."""
        node = self.graph.call_function(target, args, kwargs)
        self.complete()
        return node

    def complete(self) -> None:
        """Run the nodes appended to `graph` since the last call, and record their origin."""
        assert self._origin is not None, "nodes are appended on behalf of a logical node only"
        nodes = self.graph.nodes
        fresh: list[fx.Node] = []
        for node in reversed(nodes):
            if len(nodes) - len(fresh) == self._completed:
                break
            fresh.append(node)
        for node in reversed(fresh):
            source, backward = self._origin
            set_origin(node, source, backward=backward)
            if node.op == "call_function":
                set_value(node, self._run(node))
        self._completed = len(nodes)

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        assert callable(node.target)
        with self._mode:
            return node.target(*args, **kwargs)
