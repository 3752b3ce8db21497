"""Move all-gathers of weights and reductions of gradients over z from the graph of a microbatch to once per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from fxpar._torch.compiler import rename_placeholder
from fxpar._torch.distributed import c10d_functional
from fxpar.graph.extract import extract, returned
from fxpar.graph.memory_owners import owner_of
from fxpar.graph.min_cut import closure, users
from fxpar.ir.node_meta import Placed, communication, layout_of, set_placed, source, tensor
from fxpar.ir.op_predicates import has_effect
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.bucket_collectives import BUCKET_BYTES, bucket_collectives
from fxpar.progress.phases import as_phase


@dataclass(frozen=True, slots=True)
class Gathers:
    """`module(*pieces)` starts to gather the parameters `ports`, and returns what the graph of a microbatch takes.

    Where a weight is a view of the all-gather's output, that is the output, which the collective is still writing.
    """

    ports: tuple[Port, ...]
    module: fx.GraphModule


@dataclass(frozen=True, slots=True)
class Reductions:
    """Reductions of the gradients of parameters `ports`: `finish(*start(*sums))` returns this rank's reduced shards.

    `start(*sums)` returns outputs that collectives are still writing; `module` is both in one graph.
    """

    ports: tuple[Port, ...]
    module: fx.GraphModule
    start: fx.GraphModule
    finish: fx.GraphModule


@dataclass(frozen=True, slots=True)
class Hoisted:
    """`body`, a stage's local graph of one microbatch, and the `gathers` and `reductions` once per step, if any."""

    body: JointGraph
    gathers: Gathers | None = None
    reductions: Reductions | None = None


@as_phase
def hoist_storage(local: JointGraph, *, gathers: bool, reductions: bool) -> Hoisted:
    """Split the gathers of parameters over z off the front of `local`, and reductions of their gradients off its end.

    Gathers start in the order in which the graph uses the weights. A weight that is a view of the all-gather's output
    is waited for in the body, so that the first layers are computed while the last weights arrive; repeating the wait
    for every microbatch costs nothing. A weight that must be copied into order is waited for and copied before the
    first microbatch.

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
    """A parameter to gather: its placeholder, the last node to be hoisted, and the node of the gathered weight."""

    stored: fx.Node
    given: fx.Node
    whole: fx.Node


def _gathered(local: JointGraph) -> dict[Port, _Gathered]:
    """The parameters that are gathered over z, in the order of their gathers."""
    ports = dict(zip(_placeholders(local), local.inputs, strict=False))
    by_name = {node.name: node for node, port in ports.items() if port.kind is PortKind.PARAMETER}
    found = {}
    for node in local.module.graph.nodes:
        if (stored := by_name.get(source(node) or "")) is not None:
            found[ports[stored]] = _Gathered(stored, _last_hoisted(node), node)
    return found


def _last_hoisted(gathered: fx.Node) -> fx.Node:
    """What the body takes for a gathered value: the started all-gather if the value is a view of its output."""
    started = owner_of(gathered)
    return gathered if communication(started) is None else started


def _reduced(local: JointGraph) -> dict[Port, fx.Node]:
    """For each gradient that is reduced to shards over z: this rank's term, before the reduction."""
    by_name = {node.name: node for node in local.module.graph.nodes}
    gradients = zip(returned(local.module)[len(local.outputs) :], local.gradients, strict=True)
    return {port: by_name[name] for node, port in gradients if (name := source(node)) is not None}


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
            whole = entering[port].whole
            if tensor(node).shape == tensor(whole).shape:  # otherwise it is padded
                set_placed(node, Placed((), (layout_of(whole),)))
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
    nodes = list(local.module.graph.nodes)
    module = extract(local.module, nodes, list(leaving.values()), [ends[port] for port in leaving], [])
    bucket_collectives(module, BUCKET_BYTES)  # all of them start at the same time
    nodes, reduced = list(module.graph.nodes), returned(module)
    started = [node for node in nodes if communication(node) is not None]
    terms = module.graph.find_nodes(op="placeholder")
    start, finish = extract(module, nodes, terms, started, []), extract(module, nodes, started, reduced, [])
    return Reductions(tuple(leaving), module, start, finish)
