"""Take what need not be done for every microbatch out of a local graph: gathers of weights, reductions of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from fxpar._torch import c10d_functional, rename_placeholder
from fxpar.annotate import Placed, layout_of, move, set_placed, tensor
from fxpar.layout import REPLICATE, Layout, Replicate
from fxpar.passes.cut import closure, has_effect, users
from fxpar.passes.extract import extract, returned
from fxpar.passes.kept_memory import owner_of
from fxpar.stage import JointGraph, Port, PortKind


@dataclass(frozen=True, slots=True)
class Gathers:
    """`module(*pieces)` starts to gather the parameters `ports`, and gives what the graph of a microbatch takes.

    Of those whose gathered pieces lie in memory as they are used, that is what a collective is still writing.
    """

    ports: tuple[Port, ...]
    module: fx.GraphModule


@dataclass(frozen=True, slots=True)
class Reductions:
    """Of gradients of the parameters `ports`: `finish(*start(*sums))` gives this rank's shards of what is reduced.

    `start(*sums)` gives what collectives are still writing; `module` is both in one.
    """

    ports: tuple[Port, ...]
    module: fx.GraphModule
    start: fx.GraphModule
    finish: fx.GraphModule


@dataclass(frozen=True, slots=True)
class Hoisted:
    """A stage's local graph for each microbatch, `body`, and what is done around it once per step, if anything is."""

    body: JointGraph
    gathers: Gathers | None = None
    reductions: Reductions | None = None


def hoist_storage(local: JointGraph, *, gathers: bool, reductions: bool) -> Hoisted:
    """Split the gathers of parameters over z off the front of `local`, and reductions of their gradients off its end.

    Gathers start in the order in which the graph uses what they give. A gathered weight that lies in memory as it is
    used is waited for in the graph, so that the first layers are computed while the last weights arrive; the wait costs
    nothing when it is repeated for every microbatch. Otherwise it is waited for, and put in order, before the first.

    Before: `g = all_gather(w)`, `wait_tensor(g)`, ..., `dw = mm(...)`, `r = reduce_scatter(dw)`, `wait_tensor(r)`
    After:  gathers `all_gather(w)`; body `wait_tensor(w)`, ..., `mm(...)`;
            reductions `r = reduce_scatter(dw)`, `wait_tensor(r)`
    """
    entering = _gathered(local) if gathers else {}
    leaving = _reduced(local) if reductions else {}
    if not entering and not leaving:
        return Hoisted(local)
    return Hoisted(
        _body(local, entering, leaving),
        _gathers(local, entering) if entering else None,
        _reductions(local, leaving) if leaving else None,
    )


def _placeholders(local: JointGraph) -> list[fx.Node]:
    found: list[fx.Node] = local.module.graph.find_nodes(op="placeholder")
    return found


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A parameter on its way: its placeholder, the last node to be hoisted, and how it lies when it is gathered."""

    stored: fx.Node
    given: fx.Node
    used: Layout


def _gathered(local: JointGraph) -> dict[Port, _Gathered]:
    """Parameters that are gathered over z, in the order in which their gathers stand."""
    found = {}
    for node, port in zip(_placeholders(local), local.inputs, strict=False):
        layout = layout_of(node)
        if port.kind is PortKind.PARAMETER and layout is not None and _is_sharded(layout) and node.users:
            found[port] = _follow(node, layout.with_placement("z", REPLICATE))
    places = {node: place for place, node in enumerate(local.module.graph.nodes)}
    return dict(sorted(found.items(), key=lambda item: places[item[1].given]))


def _is_sharded(layout: Layout) -> bool:
    return not isinstance(layout.placement("z"), Replicate)


def _follow(stored: fx.Node, used: Layout) -> _Gathered:
    """Follow the one thing that is done to a parameter in its storage."""
    node = stored
    while layout_of(node) != used:
        (node,) = node.users
    started = owner_of(node)
    return _Gathered(stored, started if move(started) is not None else node, used)


def _reduced(local: JointGraph) -> dict[Port, fx.Node]:
    """For gradients that are reduced to shards over z: the terms."""
    found = {}
    for node, port in zip(returned(local.module)[len(local.outputs) :], local.gradients, strict=True):
        layout = layout_of(node)
        if port.kind is PortKind.PARAMETER and layout is not None and _is_sharded(layout):
            found[port] = _term(node)
    return found


def _term(reduced: fx.Node) -> fx.Node:
    """What is reduced: behind the reduce-scatter, the first value with a layout."""
    node = reduced
    passed = False
    while not passed or layout_of(node) is None:
        done = move(node)
        passed = passed or (done is not None and done.axis == "z")
        node = node.all_input_nodes[0]
    return node


def _body(local: JointGraph, entering: Mapping[Port, _Gathered], leaving: Mapping[Port, fx.Node]) -> JointGraph:
    placeholders = _placeholders(local)
    inputs = [
        entering[port].given if port in entering else node
        for node, port in zip(placeholders, local.inputs, strict=False)
    ]
    values = returned(local.module)
    num_outputs = len(local.outputs)
    gradients = [leaving.get(port, node) for node, port in zip(values[num_outputs:], local.gradients, strict=True)]
    nodes = list(local.module.graph.nodes)
    effects = [node for node in nodes if has_effect(node)]
    body = extract(
        local.module, nodes, [*inputs, *placeholders[len(inputs) :]], [*values[:num_outputs], *gradients], effects
    )
    for node, port in zip(body.graph.find_nodes(op="placeholder"), local.inputs, strict=False):
        if port in entering:
            rename_placeholder(node, entering[port].stored.name)
            if tensor(node).shape == tensor(entering[port].given).shape:
                set_placed(node, Placed((), (entering[port].used,)))
    body.recompile()
    return replace(local, module=body)


def _gathers(local: JointGraph, entering: Mapping[Port, _Gathered]) -> Gathers:
    nodes = list(local.module.graph.nodes)
    waits = [node for node in nodes if node.target is c10d_functional.wait_tensor.default]
    behind = closure(waits, users)
    starting = sorted(nodes, key=lambda node: node in behind)  # all start before any is waited for
    stored, given = [each.stored for each in entering.values()], [each.given for each in entering.values()]
    return Gathers(tuple(entering), extract(local.module, starting, stored, given, []))


def _reductions(local: JointGraph, leaving: Mapping[Port, fx.Node]) -> Reductions:
    ends = dict(zip(local.gradients, returned(local.module)[len(local.outputs) :], strict=True))
    terms, reduced = list(leaving.values()), [ends[port] for port in leaving]
    nodes = list(local.module.graph.nodes)
    started = [_collective(node) for node in reduced]
    return Reductions(
        tuple(leaving),
        extract(local.module, nodes, terms, reduced, []),
        extract(local.module, nodes, terms, started, []),
        extract(local.module, nodes, started, reduced, []),
    )


def _collective(reduced: fx.Node) -> fx.Node:
    node = reduced
    while move(node) is None:
        node = node.all_input_nodes[0]
    return node
