"""Ops that take graphs, such as `torch.cond`, as calls that hold them, so that passes meet ops of tensors alone."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fxpar.errors import UnsupportedGraphError
from fxpar.ir.node_meta import known_value, module_path


@dataclass(frozen=True, eq=False, repr=False)
class HoldingCall:
    """A call that holds graphs that PyTorch passes as arguments: the target of a node.

    It is named by what its graphs compute: that is how equal ops are known, and how code calls it.
    """

    graphs: tuple[fx.GraphModule, ...]

    def __post_init__(self) -> None:
        """Name the call."""
        text = "\n".join(line for graph in self.graphs for line in _described(graph))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        for attribute in ("__name__", "__qualname__"):
            object.__setattr__(self, attribute, f"{self.prefix}_{digest}")

    @property
    def prefix(self) -> str:
        """What the name begins with: the op."""
        raise NotImplementedError

    def __repr__(self) -> str:
        name: str = vars(self)["__name__"]
        return name

    def nodes(self) -> Iterator[fx.Node]:
        """The nodes of all graphs."""
        for graph in self.graphs:
            yield from graph.graph.nodes


@dataclass(frozen=True, eq=False, repr=False)
class HigherOrderCall(HoldingCall):
    """An op of control flow, or a function with a gradient of its own, with its graphs.

    op: PyTorch's op, such as `torch.ops.higher_order.cond`.
    places: where the graphs are among the op's arguments.
    """

    op: torch._ops.HigherOrderOperator
    places: tuple[int, ...]

    @property
    def prefix(self) -> str:
        """The op's own name."""
        name: str = self.op.name()
        return name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call PyTorch's op."""
        graphs, others = dict(zip(self.places, self.graphs, strict=True)), iter(args)
        count = len(args) + len(graphs)
        return self.op(*(graphs[i] if i in graphs else next(others) for i in range(count)), **kwargs)


def hold_graphs(module: fx.GraphModule) -> None:
    """Replace every call of an op that takes graphs in `module` by one that holds them.

    Before: `y = cond(flag, self.true_graph_0, self.false_graph_0, (x,))`
    After:  `y = cond_1f0e23cd00a1b2c3(flag, (x,))`
    """
    for node in list(module.graph.nodes):
        graphs = graphs_of(module, node)
        if graphs and isinstance(node.target, torch._ops.HigherOrderOperator):
            _check_sizes(node)
            held = [node.args[place] for place in graphs]
            node.target = HigherOrderCall(tuple(graphs.values()), node.target, tuple(graphs))
            node.args = tuple(arg for place, arg in enumerate(node.args) if place not in graphs)
            erase_unused(held)
            module.recompile()


def erase_unused(graphs: Iterable[Any]) -> None:
    """Erase those of the nodes that stand for graphs that nothing calls any more."""
    for graph in dict.fromkeys(graphs):
        if not graph.users:
            graph.graph.erase_node(graph)


def _check_sizes(node: fx.Node) -> None:
    results: list[Any] = tree_leaves(known_value(node))
    if any(isinstance(size, torch.SymInt) for result in results if isinstance(result, Tensor) for size in result.shape):
        raise UnsupportedGraphError(
            f"{node.target} in module {module_path(node)!r} keeps what each iteration computes, for its gradient, but "
            "how many iterations there are is not known: expected a known number, as of a loop in Python or of "
            "torch._higher_order_ops.scan; or call the model under torch.no_grad()"
        )


def graphs_of(module: fx.GraphModule, node: fx.Node) -> Mapping[int, fx.GraphModule]:
    """The graphs among the arguments of `node`, by their places."""
    if node.op != "call_function":
        return {}
    constants = {i: arg for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr"}
    values = {i: operator.attrgetter(str(arg.target))(module) for i, arg in constants.items()}
    return {i: found for i, found in values.items() if isinstance(found, fx.GraphModule)}


def _described(graph: fx.GraphModule) -> Iterator[str]:
    """Every operation of a graph with its arguments, whatever its nodes are called."""
    names = {node: f"%{position}" for position, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            yield from _described_constant(operator.attrgetter(node.target)(graph))
        else:
            given = fx.node.map_aggregate((node.args, node.kwargs), lambda each: _plain(each, names))
            yield f"{node.op} {'' if node.op == 'placeholder' else _target(node)} {given}"


def _described_constant(constant: Any) -> Iterator[str]:
    if isinstance(constant, fx.GraphModule):
        yield from _described(constant)
    else:
        yield f"{constant.dtype} {constant.tolist()}"


def _plain(argument: Any, names: Mapping[fx.Node, str]) -> Any:
    if isinstance(argument, fx.Node):
        return names[argument]
    return argument.type if isinstance(argument, torch.device) else argument


def _target(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else torch.typename(node.target)
