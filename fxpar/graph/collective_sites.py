"""The collectives of a graph that may run beside computation: what each waits for, and which rule it falls under."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxpar._torch import c10d_functional
from fxpar.graph.redistribute import local_size
from fxpar.ir.node_meta import communication, layout_of, tensor
from fxpar.ir.op_predicates import is_free_to_recompute, is_pointwise
from fxpar.ir.overlap_options import OverlapRule

aten = torch.ops.aten

_REARRANGING = (
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    aten.zeros_like.default,
)
_ATTENTION_ON_CPU = (  # which PyTorch's registry leaves out
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


@dataclass(frozen=True, slots=True)
class Site:
    """A collective: its start and its wait, the rule that it falls under, and the ops that it can start after.

    num_bytes: of its result, on the rank that has most.
    """

    start: fx.Node
    wait: fx.Node
    rule: OverlapRule
    sources: frozenset[fx.Node]
    num_bytes: int

    @property
    def held_bytes(self) -> int:
        """Of what it was given, on the rank that has most: of a reduction, one result for each rank it has one for."""
        given, result = tensor(self.start.all_input_nodes[0]), tensor(self.start)
        return self.num_bytes * max(1, given.numel() // max(1, result.numel()))


def find_sites(graph: fx.Graph, rules: AbstractSet[OverlapRule]) -> list[Site]:
    """The collectives of `graph` under one of the `rules`, in its order.

    What only leaves the graph, if rearranged or added to something, falls under "reduce_scatters", as gradients of
    weights do. What is made of inputs alone falls under "all_gathers". All else is computed and needed, and falls under
    "input_gradients". Nothing here depends on sizes, which may differ between ranks.
    """
    leaving, given = _leaving(graph), _given(graph)
    sites = []
    for node in graph.nodes:
        done, waits = communication(node), [user for user in node.users if _waits(user)]
        if done is None or not waits:  # others hand it over while it is under way
            continue
        (wait,) = waits
        rule: OverlapRule = (
            "reduce_scatters" if wait in leaving else "all_gathers" if node in given else "input_gradients"
        )
        if rule in rules:
            sources = _sources(node, through_collectives=rule == "input_gradients")
            sites.append(Site(node, wait, rule, sources, _result_bytes(wait) or done.num_bytes))
    return sites


def is_matmul(node: fx.Node) -> bool:
    """Whether `node` is a matmul, a convolution or an attention: what takes time to compute."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    packet = node.target.overloadpacket
    return packet in flop_registry or packet in _ATTENTION_ON_CPU


def is_collective(node: fx.Node) -> bool:
    """Whether `node` starts a collective or waits for one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == c10d_functional.name


def late_ops(graph: fx.Graph, sites: Iterable[Site]) -> set[fx.Node]:
    """The waits, and what does nothing but rearrange what they give or hand it out of the graph: run when needed.

    Among them are the waits for what started before the graph.
    """
    waits: dict[fx.Node, Site] = {site.wait: site for site in sites}
    late = {node for node in graph.nodes if _waits(node) and node.all_input_nodes[0].op == "placeholder"}
    of_leaving: set[fx.Node] = set()
    for node in graph.nodes:
        behind = any(operand in of_leaving for operand in node.all_input_nodes)
        if (node in waits and waits[node].rule == "reduce_scatters") or (behind and node.op != "output"):
            of_leaving.add(node)
        elif node in waits or (_rearranges(node) and late.issuperset(node.all_input_nodes)):
            late.add(node)
    return late | of_leaving


def waits_of(graph: fx.Graph, sites: Iterable[Site], late: AbstractSet[fx.Node]) -> dict[fx.Node, list[Site]]:
    """For each node, the sites that it waits for if nobody has before, in the order in which that happens."""
    starts = {site.start: site for site in sites}
    waits: dict[fx.Node, list[Site]] = {}
    for node in graph.nodes:
        behind = [operand for operand in node.all_input_nodes if operand in late or communication(operand) is not None]
        waiting = dict.fromkeys(site for operand in behind for site in waits[operand])
        waits[node] = [*waiting, starts[node]] if node in starts else list(waiting)
    return waits


def _leaving(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values only leave the graph, by way of collectives and of ops that take next to no time."""
    leaving: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.users and all(user.op == "output" or (user in leaving and _is_passive(user)) for user in node.users):
            leaving.add(node)
    return leaving


def _given(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are made of inputs alone, by rearranging and by collectives."""
    given: set[fx.Node] = set()
    for node in graph.nodes:
        moves = node.op == "call_function" and _moves(node)
        if node.op in ("placeholder", "get_attr") or (moves and given.issuperset(node.all_input_nodes)):
            given.add(node)
    return given


def _sources(start: fx.Node, *, through_collectives: bool) -> frozenset[fx.Node]:
    """The nearest ops that compute what `start` takes; behind another collective, perhaps those of both."""
    passed: Callable[[fx.Node], bool] = _moves if through_collectives else _rearranges
    sources, pending, seen = set[fx.Node](), list(start.all_input_nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_function" and passed(node):
            pending.extend(node.all_input_nodes)
        else:
            sources.add(node)
    return frozenset(sources)


def _result_bytes(wait: fx.Node) -> int:
    """The bytes of the largest piece of what is waited for; 0 where that has no layout, as several weights together."""
    node = wait
    while (layout := layout_of(node)) is None:
        behind = list(node.users)
        if len(behind) != 1 or not _rearranges(behind[0]):
            return 0
        (node,) = behind
    return local_size(layout) * tensor(node).element_size()


def _moves(node: fx.Node) -> bool:
    return _rearranges(node) or is_collective(node)


def _waits(node: fx.Node) -> bool:
    return node.target is c10d_functional.wait_tensor.default


def _rearranges(node: fx.Node) -> bool:
    """Whether `node` computes nothing: a view, a copy, a cast, padding, a concatenation."""
    return bool(node.all_input_nodes) and (is_free_to_recompute(node) or node.target in _REARRANGING)


def _is_passive(node: fx.Node) -> bool:
    """Whether `node` takes next to no time."""
    return _moves(node) or is_pointwise(node.target)
