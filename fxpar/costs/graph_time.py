"""The time of a local graph: a roofline for computation, Eqs. 1-3 and 10 for the communication that overlaps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from fxpar._torch.distributed import c10d_functional
from fxpar.costs.equations import elements_sent, ring_time_us
from fxpar.costs.op_cost import flops_of
from fxpar.costs.placement import spread
from fxpar.costs.prices import Prices
from fxpar.ir.node_meta import Communication, communication, fused, value
from fxpar.ir.op_predicates import is_free_to_recompute
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Traffic:
    """All collectives along one axis: how many, the bytes that each rank sends in rings, and their time."""

    num_collectives: int = 0
    bytes_sent: float = 0.0
    time_us: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.num_collectives + other.num_collectives,
            self.bytes_sent + other.bytes_sent,
            self.time_us + other.time_us,
        )

    def times(self, count: float) -> Traffic:
        """`count` times the same."""
        return Traffic(round(count * self.num_collectives), count * self.bytes_sent, count * self.time_us)


@dataclass(frozen=True, slots=True)
class GraphTime:
    """The time of a graph on one rank: from start to end, computation alone, and all communication by axis.

    `waited_us` is how long computation waits for each collective, by the name of the node that starts it, or of the
    fused op that it is a part of; `exposed_by_axis_us` is how long nothing is computed for want of a collective, by its
    axis, also at the end.
    """

    total_us: float
    compute_us: float
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    waited_us: Mapping[str, float] = field(default_factory=dict)
    exposed_by_axis_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def exposed_us(self) -> float:
        """The time in which computation waits for communication."""
        return self.total_us - self.compute_us


class GraphModel:
    """Predicts the time of graphs of one rank of `mesh` at `prices`.

    Communication inside hosts, communication between hosts, and computation run concurrently. On either network, the
    bytes of one collective are sent after those of another, in the order in which they start; latencies overlap. A
    fused op takes the longer of its matmuls and its collective, and the latency.
    """

    def __init__(self, mesh: Mesh, prices: Prices) -> None:
        self._sizes, self._prices = mesh.sizes, prices
        self._crosses = {axis: spread(mesh, axis).rings_per_host > 0 for axis in mesh.sizes}

    def traffic(self, done: Communication) -> Traffic:
        """The traffic of one collective: Eqs. 1-3 at the bandwidth of its axis (Singh et al.), and its latency."""
        parts, link = self._sizes[done.axis], self._prices.links[done.axis]
        if parts == 1:
            return Traffic()
        factor = self._prices.reduce_scatter_factor if done.kind == "reduce_scatter" else 1.0
        time_us = self._latency_us(done.axis) + factor * ring_time_us(
            done.kind, done.num_bytes, parts, link.bytes_per_us
        )
        return Traffic(1, elements_sent(done.kind, done.num_bytes, parts), time_us)

    def _latency_us(self, axis: str) -> float:
        return self._prices.links[axis].latency_us if self._sizes[axis] > 1 else 0.0

    def compute_us(self, node: fx.Node) -> float:
        """The time of a node's arithmetic or of its memory traffic, whichever takes longer.

        A matmul reads its operands and writes its result. Pointwise operations are assumed to be fused into one
        another: each only writes its result, once.
        """
        if node.op != "call_function" or is_free_to_recompute(node):
            return 0.0
        results = _tensors(value(node))
        if not results:
            return 0.0
        flops, moved = flops_of(node), sum(result.nbytes for result in results)
        if flops:
            moved += sum(tensor.nbytes for operand in node.all_input_nodes for tensor in _tensors(value(operand)))
        arithmetic_us = self._prices.arithmetic_us(flops, results[0].dtype)
        return max(arithmetic_us, moved / self._prices.memory_bytes_per_us)

    def fused_us(self, done: Communication, matmul_us: float) -> float:
        """A matmul and a collective as one op: the longer of both, and a latency for the chunk without overlap."""
        return max(matmul_us, self.traffic(done).time_us) + self._latency_us(done.axis)

    def time(self, module: fx.GraphModule) -> GraphTime:
        """Simulate a graph, node by node. It ends with its last collective, whether that is waited for or not."""
        return self.time_in_order(module.graph.nodes)

    def time_in_order(self, nodes: Iterable[fx.Node]) -> GraphTime:
        """The same for the nodes of a graph in the given order."""
        now, computed = 0.0, 0.0
        ends: dict[fx.Node, float] = {}
        free_at: defaultdict[bool, float] = defaultdict(float)
        total: defaultdict[str, Traffic] = defaultdict(Traffic)
        waited: dict[str, float] = {}
        exposed: defaultdict[str, float] = defaultdict(float)
        for node in nodes:
            waits = node.target is c10d_functional.wait_tensor.default
            taken_us = 0.0 if waits or communication(node) is not None else self.compute_us(node)
            now, computed, started = now + taken_us, computed + taken_us, now
            if (done := communication(node) or fused(node)) is not None:
                one, line = self.traffic(done), self._crosses[done.axis]
                latency_us = self._latency_us(done.axis)
                free_at[line] = max(started, free_at[line]) + one.time_us - latency_us
                ends[node] = free_at[line] + latency_us
                total[done.axis] += one
                if fused(node) is not None:
                    waited[node.name] = max(0.0, ends[node] - now) + latency_us
                    exposed[done.axis] += waited[node.name]
                    now += waited[node.name]
            elif waits:
                start = node.all_input_nodes[0]
                waited[start.name] = max(0.0, ends.get(start, now) - now)
                now += waited[start.name]
                if waited[start.name] and (waited_for := communication(start)) is not None:
                    exposed[waited_for.axis] += waited[start.name]
        for node, end_us in sorted(ends.items(), key=lambda item: item[1]):
            if end_us > now and (last := communication(node) or fused(node)) is not None:
                exposed[last.axis] += end_us - now
                now = end_us
        return GraphTime(now, computed, dict(total), waited, dict(exposed))


def one_after_another(graphs: Iterable[GraphTime]) -> GraphTime:
    """The time of several graphs that run one after another; it does not tell their collectives apart."""
    parts = list(graphs)
    exposed: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for axis, exposed_us in part.exposed_by_axis_us.items():
            exposed[axis] += exposed_us
    return GraphTime(
        sum(part.total_us for part in parts),
        sum(part.compute_us for part in parts),
        add_up(part.traffic for part in parts),
        exposed_by_axis_us=dict(exposed),
    )


def add_up(graphs: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    """The traffic of several graphs together, by axis."""
    total: defaultdict[str, Traffic] = defaultdict(Traffic)
    for traffic in graphs:
        for axis, of_axis in traffic.items():
            total[axis] += of_axis
    return dict(total)


def _tensors(found: object) -> list[Tensor]:
    parts = found if isinstance(found, tuple | list) else (found,)
    return [part for part in parts if isinstance(part, Tensor)]
