"""Write nodes of local tensors, each with its fake value, its forward or backward tag and its origin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from fxpar._torch.compiler import FakeTensor, FakeTensorMode, fake_tensor
from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar.ir.node_meta import is_backward, set_origin, set_value, tensor, value
from fxpar.ir.strides import dense_strides, inverse, is_dense, lies_in_order, stride_order

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
    """A graph under construction. The fake value of every call is known immediately."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph: fx.Graph = _NamedGraph()
        self._mode = mode
        self._origin: tuple[fx.Node, bool] | None = None
        self._completed = 0
        self._results: dict[Hashable, Any] = {}  # whole fake values, by the kind of call

    @contextmanager
    def on_behalf_of(self, source: fx.Node, *, backward: bool) -> Iterator[None]:
        """New nodes inside are made for `source`, a node of the logical graph, and are tagged forward or backward."""
        before = self._origin
        self._origin = (source, backward)
        yield
        self._origin = before

    def placeholder(self, name: str, shape: Sequence[int], like: Tensor) -> fx.Node:
        """A dense input of `shape` that has the stride order of `like`."""
        strides = dense_strides(shape, stride_order(like))
        return self.given(
            self.graph.placeholder(name), fake_tensor(self._mode, like.dtype, shape, strides, like.device)
        )

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
        """The fake value of a call. A call that an equal one has run is not run again: layers make the same calls."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        kind = node.target, _form(args), _form(kwargs)
        if kind in self._results:
            return fx.node.map_aggregate(self._results[kind], _copy)
        assert callable(node.target)
        with self._mode:
            result = node.target(*args, **kwargs)
        if _is_whole(result):
            self._results[kind] = result
        return result


def _form(given: Any) -> Hashable:
    """All of an argument that the form of a call's result depends on."""
    if isinstance(given, Tensor):
        return given.dtype, given.device, tuple(given.shape), given.stride(), given.untyped_storage().nbytes()
    if isinstance(given, tuple | list):
        return tuple(map(_form, given))
    if isinstance(given, dict):
        return tuple((name, _form(each)) for name, each in given.items())
    return type(given), given


def _is_whole(result: Any) -> bool:
    """Whether no tensor of a result is a part of a larger storage, which a copy would not show."""
    if isinstance(result, tuple | list):
        return all(map(_is_whole, result))
    return not isinstance(result, Tensor) or (is_dense(result) and result.untyped_storage().nbytes() == result.nbytes)


def _copy(result: Any) -> Any:
    """A fake value of the same form."""
    if not isinstance(result, FakeTensor):
        return result
    return fake_tensor(result.fake_mode, result.dtype, result.shape, result.stride(), result.device)
