"""Start collectives early and wait for them late, so that they run concurrently with computation."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from fxpar.graph.collective_sites import Site, find_sites, late_ops, waits_of
from fxpar.graph.extract import reordered
from fxpar.ir.overlap_options import Overlap
from fxpar.passes.overlap.defer_weight_gradients import defer_weight_gradients
from fxpar.passes.overlap.gather_ahead import gather_ahead
from fxpar.progress.phases import as_phase


@as_phase
def overlap_collectives(module: fx.GraphModule, overlap: Overlap) -> fx.GraphModule:
    """`module` with its nodes reordered by the rules that `overlap` names; the results are the same, bit by bit.

    "input_gradients": a collective of a computed value, whose result is used again, starts as soon as its operand is
    computed, and is waited for at its first use. Ops that it does not need run in between (see
    `defer_weight_gradients`).
    "reduce_scatters": a collective whose result only leaves the graph starts as soon as its operand is computed. It is
    waited for at the end, in the order of starts, or earlier if more would be in flight than `overlap.held_reductions`
    allows.
    "all_gathers": a collective of inputs alone starts a layer before its first use (see `gather_ahead`).

    The order of starts follows from the graph's structure, so it is the same on all ranks of a group whose graphs
    differ only in sizes and slices. All other ops keep their order.
    Source: Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training", the section on overlapping.

    Before: `dx = mm(dy, w_t); dw = mm(x_t, dy); all_reduce = all_reduce(dx); wait = wait_tensor(all_reduce); ...`
    After:  `dx = mm(dy, w_t); all_reduce = all_reduce(dx); dw = mm(x_t, dy); wait = wait_tensor(all_reduce); ...`
    """
    return reordered(module, overlapping_order(module.graph, overlap))


def overlapping_order(graph: fx.Graph, overlap: Overlap) -> list[fx.Node]:
    """The nodes of `graph` in the order in which `overlap_collectives` puts them."""
    sites = find_sites(graph, overlap.rules)
    return _Order(graph, sites, overlap).run()


class _Order:
    """The order of nodes, under construction."""

    def __init__(self, graph: fx.Graph, sites: Sequence[Site], overlap: Overlap) -> None:
        self._graph = graph
        self._sites = sites
        self._overlap = overlap
        self._under_way = _UnderWay(sites, overlap.held_reductions)
        self._placed: dict[fx.Node, None] = {}
        self._missing = {site: len(site.sources) for site in sites if site.rule != "all_gathers"}
        self._behind: dict[fx.Node, list[Site]] = {}
        for site in self._missing:
            for source in site.sources:
                self._behind.setdefault(source, []).append(site)
        self._ready: list[Site] = []

    def run(self) -> list[fx.Node]:
        """All nodes of the graph."""
        graph, sites = self._graph, self._sites
        late = late_ops(graph, sites)
        waits = waits_of(graph, sites, late)
        elsewhere = late | {site.start for site in sites}
        ops = [node for node in graph.nodes if _computes(node) and node not in elsewhere]
        computed = [site for site in sites if site.rule == "input_gradients"]
        ops = defer_weight_gradients(graph, ops, computed, waits)
        gathers = gather_ahead(ops, waits, self._overlap.gather_ahead_bytes)
        for node in graph.find_nodes(op="placeholder"):
            self._place(node)
        self._start_ready()
        for op in ops:
            for site in gathers.get(op, ()):
                self._place(site.start)
            self._place(op)
            self._start_ready()
        self._finish()
        return list(self._placed)

    def _place(self, node: fx.Node) -> None:
        """Append `node` after those of its operands that are not placed yet, followed by the items of its result."""
        if node in self._placed:
            return
        for operand in node.all_input_nodes:
            self._place(operand)
        self._placed[node] = None
        for site in self._behind.get(node, ()):
            self._missing[site] -= 1
            if self._missing[site] == 0:
                self._ready.append(site)
        for user in node.users:
            if user.target is operator.getitem:
                self._place(user)

    def _start_ready(self) -> None:
        """Start the collectives whose operands are all computed."""
        while self._ready:
            site = self._ready.pop(0)
            for waited in self._under_way.start(site):
                self._place(waited.wait)
            self._place(site.start)

    def _finish(self) -> None:
        """Append the waits for results that leave the graph, in the order of their starts, then all other nodes."""
        leaving = [site for site in self._sites if site.rule == "reduce_scatters"]
        for site in leaving:
            self._place(site.start)
        places = {node: index for index, node in enumerate(self._placed)}
        for site in sorted(leaving, key=lambda site: places[site.start]):
            self._place(site.wait)
        for node in self._graph.nodes:
            self._place(node)


class _UnderWay:
    """The reductions in flight, the oldest first."""

    def __init__(self, sites: Sequence[Site], held: float) -> None:
        sizes = [site.held_bytes for site in sites if site.rule == "reduce_scatters"]
        self._budget = held * max(sizes, default=0)
        self._sites: list[Site] = []

    def start(self, site: Site) -> list[Site]:
        """Record the start of `site`; returns the sites that must be waited for before."""
        if site.rule != "reduce_scatters":
            return []
        done: list[Site] = []
        while self._sites and sum(each.held_bytes for each in (*self._sites, site)) > self._budget:
            done.append(self._sites.pop(0))
        self._sites.append(site)
        return done


def _computes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and node.target is not operator.getitem
