"""Let losses be divided by numbers of the whole batch, such as its number of targets, instead of a microbatch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensor
from fxpar.graph.changes_in_place import changed_sources, storages_mutated_later
from fxpar.graph.extract import extract, returned
from fxpar.graph.min_cut import closure, operands, users
from fxpar.graph.shared_values import recomputable
from fxpar.ir.batch_totals import BatchTotals
from fxpar.ir.capture import Capture, example
from fxpar.ir.example_values import add_call
from fxpar.ir.markers import is_marker
from fxpar.ir.mean_losses import divide_by_counts, has_counted_mean
from fxpar.ir.node_meta import known_value, requires_grad
from fxpar.ir.op_predicates import is_view
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.decompose.whole_values import WholeValues, find_whole_values
from fxpar.passes.trace_part import trace_part
from fxpar.progress.phases import as_phase

aten = torch.ops.aten

_GUARDS = (aten.clamp.default, aten.clamp_min.default, aten.maximum.default)
"""What keeps a number that something is divided by from being zero."""

_ARITHMETIC = {"add", "sub", "mul", "div", "truediv", "true_divide", "divide", "pow", "rsub", "multiply", "_quotient"}
"""The names of functions and methods that compute with an integer as with any other number."""

_SAME_NUMBER = (aten._to_copy.default, aten.detach.default, aten.alias.default)


@as_phase
def total_over_batch(capture: Capture, distribution: Distribution) -> Capture:
    """The capture with numbers that depend on sums over the whole batch as inputs, which each step computes first.

    A batch is computed in parts, which are its microbatches on all batch shards, and the loss is the mean of theirs. So
    what a forward divides by must not be the sum over one part. It becomes the mean over the parts, by which a loss of
    the form `sum / number` is that of the whole batch: `mean(sum_i / mean(number_i)) = sum(sum_i) / sum(number_i)`.

    This is done for sums over samples that depend on no parameter, for largest and smallest values, and for what is
    computed from such alone, if it is one number. A lower bound is that of the whole sum: `sum.clamp(min=1)` is one
    divided by the number of parts.

    Before: `loss = cross_entropy(logits, target, ignore_index=-100)`
    After:  `loss = _quotient(cross_entropy(logits, target, ignore_index=-100, reduction="sum"), batch_total_0)`
    """
    return _with_totals(capture, distribution.num_parts(capture)) or capture


def _with_totals(capture: Capture, num_parts: int) -> Capture | None:
    """The result of `total_over_batch`; None if nothing changes."""
    if num_parts == 1 or capture.microbatch_size is None:
        return None
    known = _known_values(capture)
    if not (_numbers(capture, known) or any(has_counted_mean(node, known) for node in capture.operations())):
        return None
    capture = capture.copied()
    divide_by_counts(capture.module, _known_values(capture))
    numbers = _numbers(capture, _known_values(capture))
    search = _Search.of(capture, numbers) if numbers else None
    found = search.used_elsewhere() if search else {}
    if search is None or not found:
        return None
    totals = search.totals(found, num_parts)
    sources = {**capture.sources, **_replace(capture.module, found, totals)}
    return replace(capture, sources=sources, totals=totals)


def _known_values(capture: Capture) -> set[fx.Node]:
    """The values that depend on no parameter, and on no buffer that the forward changes, and need no gradient."""
    nodes = capture.operations()
    data = {node for node, port in capture.sources.items() if port.kind in (PortKind.INPUT, PortKind.BUFFER)}
    found = {*data - changed_sources(nodes, data), *recomputable(nodes, capture.sources)}
    return {node for node in found if not requires_grad(node)}


def _numbers(capture: Capture, known: set[fx.Node]) -> list[fx.Node]:
    """Those of the known values that are one number, and that depend on the samples of a batch.

    What is computed within a transform of `torch.func` cannot be computed outside of it, and is left out.
    """
    split = [node for node, port in capture.sources.items() if port in capture.batch_dims]
    of_batch, nodes = closure(split, users), capture.operations()
    transformed = closure([node for node in nodes if _is_transformed(node)], users)
    found = known & of_batch - transformed
    return [node for node in nodes if node in found and _is_one_number(node)]


def _is_transformed(node: fx.Node) -> bool:
    value = known_value(node)
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _is_one_number(node: fx.Node) -> bool:
    value = known_value(node)
    return isinstance(value, Tensor) and value.numel() == 1


@dataclass(frozen=True, slots=True)
class _Search:
    """What is known of `numbers` of a capture.

    joint: the ATen graph that computes them from `inputs`, a port for each of its placeholders.
    values: which of its nodes are sums or extremes over samples, and which are computed from such alone.
    """

    numbers: Sequence[fx.Node]
    joint: JointGraph
    inputs: Mapping[fx.Node, Port]
    values: WholeValues

    @classmethod
    def of(cls, capture: Capture, numbers: Sequence[fx.Node]) -> _Search:
        needed = _needed_for(numbers, capture)
        inputs = tuple(node for node in capture.sources if node in needed)
        nodes = tuple(node for node in capture.operations() if node in needed)
        joint = trace_part(capture.module, nodes, inputs, numbers)
        ports = [capture.sources[inputs[int(port.name)]] for port in joint.inputs]
        placeholders = joint.module.graph.find_nodes(op="placeholder")
        dims = {
            own: capture.batch_dims[port]
            for own, port in zip(joint.inputs, ports, strict=True)
            if port in capture.batch_dims
        }
        assert capture.microbatch_size is not None
        values = find_whole_values(joint, dims, capture.microbatch_size)
        return cls(numbers, joint, dict(zip(placeholders, ports, strict=True)), values)

    def used_elsewhere(self) -> dict[fx.Node, fx.Node]:
        """The numbers of the whole batch of which others than such numbers are computed, with their ATen nodes."""
        made = zip(self.numbers, returned(self.joint.module), strict=True)
        whole = {n: node for n, node in made if node in self.values.derived and self._is_computed_from_means(node)}
        return {number: node for number, node in whole.items() if _takers(number, whole, self._dtype(number, node))}

    def _dtype(self, number: fx.Node, node: fx.Node) -> torch.dtype:
        """Of a total in the place of `number`, of which `node` is the ATen node: means of integers are no integers."""
        dtype = example(number).dtype
        is_exact = (
            dtype.is_floating_point or dtype == torch.bool or self._reduced_for([node]).isdisjoint(self.values.sums)
        )
        return dtype if is_exact else torch.float32

    def _is_computed_from_means(self, number: fx.Node) -> bool:
        """Whether a number may be computed from means of sums, which are no integers: pointwise."""
        found = self._of_batch([number])
        calls = [node for node in found.graph.graph.nodes if node.op == "call_function"]
        return not found.sums or all(map(_is_pointwise, calls))

    def _reduced_for(self, wanted: Sequence[fx.Node]) -> Set[fx.Node]:
        """What `wanted` are computed from, as far back as the sums and extremes."""
        values = self.values
        return closure(
            wanted, lambda node: () if node in values.sums or node in values.extremes else node.all_input_nodes
        )

    def _of_batch(self, wanted: Sequence[fx.Node]) -> _OfBatch:
        """What the ATen nodes `wanted` are computed from, and the graph that does so."""
        values, module, after = self.values, self.joint.module, self._reduced_for(wanted)
        sums, extremes, constants = (
            [node for node in nodes if node in after] for nodes in (values.sums, values.extremes, self.inputs)
        )
        given = [*sums, *extremes, *constants]
        return _OfBatch(sums, extremes, constants, extract(module, list(module.graph.nodes), given, wanted, ()))

    def totals(self, found: Mapping[fx.Node, fx.Node], num_parts: int) -> BatchTotals:
        """How a step computes the numbers `found`."""
        whole, module = self._of_batch([*found.values()]), self.joint.module
        _bound_whole_sums(whole.graph, {node.name for node in whole.sums}, num_parts)
        reduced = [*whole.sums, *whole.extremes]
        before = closure(reduced, operands)
        inputs = [node for node in self.inputs if node in before]
        return BatchTotals(
            extract(module, list(module.graph.nodes), inputs, reduced, ()),
            tuple(map(self.inputs.__getitem__, inputs)),
            tuple(map(self.values.extremes.__getitem__, whole.extremes)),
            whole.graph,
            tuple(map(self.inputs.__getitem__, whole.constants)),
            tuple(Port(PortKind.INPUT, f"batch_total_{position}") for position in range(len(found))),
            tuple(self._dtype(number, node) for number, node in found.items()),
        )


@dataclass(frozen=True, slots=True)
class _OfBatch:
    """A graph that takes sums and extremes over the whole batch, and constants, in this order; nodes of another one."""

    sums: Sequence[fx.Node]
    extremes: Sequence[fx.Node]
    constants: Sequence[fx.Node]
    graph: fx.GraphModule


def _needed_for(numbers: Sequence[fx.Node], capture: Capture) -> set[fx.Node]:
    """All that the numbers are computed from, and what changes any of it in place."""
    changes = list(storages_mutated_later(capture.operations()))
    needed: set[fx.Node] = set()
    wanted = {*numbers}
    while not wanted <= needed:
        needed |= closure(wanted, lambda node: () if node in capture.sources else node.all_input_nodes)
        wanted = {mutator for changed, mutator in changes if changed in needed}
    return needed


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    is_pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return is_pointwise or target in _SAME_NUMBER or is_view(target) or not node.all_input_nodes


def _takers(node: fx.Node, numbers: Mapping[fx.Node, fx.Node], dtype: torch.dtype) -> list[fx.Node]:
    """What uses a number, and takes a total of this dtype in its place: none of the numbers, nor where it leaves.

    A total in the place of an integer that is none is no index.
    """
    users = [user for user in node.users if user not in numbers and user.op != "output" and not is_marker(user, "exit")]
    return users if dtype == example(node).dtype else [user for user in users if _is_arithmetic(user)]


def _is_arithmetic(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _ARITHMETIC


def _bound_whole_sums(of_batch: fx.GraphModule, sums: Set[str], num_parts: int) -> None:
    """Let lower bounds be those of whole sums, where `of_batch` takes the means over parts that are named `sums`."""
    graph = of_batch.graph
    for node in list(graph.nodes):
        if node.target in _GUARDS and _origin(node.args[0]).name in sums:
            with graph.inserting_before(node):
                node.update_arg(0, graph.call_function(aten.mul.Tensor, (node.args[0], num_parts)))
            with graph.inserting_after(node):
                mean = graph.call_function(aten.div.Tensor, (node, num_parts))
            node.replace_all_uses_with(mean, delete_user_cb=lambda user, mean=mean: user is not mean)
    of_batch.recompile()


def _origin(node: fx.Node) -> fx.Node:
    """The node that `node` is a copy of, in another dtype at most, or `node` itself."""
    return _origin(node.all_input_nodes[0]) if node.target in _SAME_NUMBER else node


def _replace(module: fx.GraphModule, found: Mapping[fx.Node, fx.Node], totals: BatchTotals) -> dict[fx.Node, Port]:
    """Let users of the numbers `found` take `totals` instead; returns the nodes where these enter."""
    entering = {}
    first = next(iter(module.graph.nodes))
    for number, port, dtype in zip(found, totals.results, totals.dtypes, strict=True):
        with module.graph.inserting_before(first):
            total = module.graph.placeholder(port.name)
        value = example(number)
        assert isinstance(value, FakeTensor), "every example value is one"
        with value.fake_mode:
            total.meta["example_value"] = torch.empty(value.shape, dtype=dtype, device=value.device)
        for user in _takers(number, found, dtype):
            user.replace_input_with(number, total if dtype == value.dtype else _like_integer(user, total))
        entering[total] = port
    module.recompile()
    return entering


def _like_integer(user: fx.Node, total: fx.Node) -> fx.Node:
    """A total for a user that took an integer, which does not change the dtype of what is computed with it."""
    result = known_value(user)
    keeps = not isinstance(result, Tensor) or not result.is_floating_point() or result.dtype == example(total).dtype
    return total if keeps else add_call(user, Tensor.to, total, result.dtype)
