"""Prove sharding rules numerically, in one process.

For every strategy that a rule admits: shard the operands, run the emitted local op for each coordinate of the mesh,
assemble the results, and compare them with those of the whole op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from fxpar.ir.layout import Layout, Partial, Placement, Shard
from fxpar.ir.strides import inverse, is_dense, stride_order
from fxpar.ir.tiles import assemble, shard_of
from fxpar.rules.call import op_call
from fxpar.rules.lookup import rule_for
from fxpar.rules.rule import LocalOp, OpCall, Operand, Rule, Shape, Strategy
from fxpar.rules.strategies import admissible

aten = torch.ops.aten
Coordinate = Mapping[str, int]

_UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Ops whose results have no values to compare."""

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 3e-2, torch.bfloat16: 2e-1}
"""The largest difference that rounding explains, for random contributions to values of magnitude 1."""


class RuleDisprovedError(AssertionError):
    """A strategy's local ops do not add up to the whole op."""

    def __init__(self, call: OpCall, layouts: Mapping[str, Strategy], detail: str) -> None:
        shapes = ", ".join(str(list(shape)) for shape in call.inputs)
        chosen = "; ".join(f"{axis}: {describe(strategy)}" for axis, strategy in layouts.items())
        super().__init__(f"{call.target} on {shapes} with {chosen}: {detail}")


def describe(strategy: Strategy) -> str:
    """A strategy in one line, such as `S(1), S(0) -> P(sum)`."""
    return f"{', '.join(map(str, strategy.inputs))} -> {', '.join(map(str, strategy.outputs))}"


@dataclass(frozen=True, slots=True)
class OpSample:
    """A call of an op with real tensors: the call as rules see it, its operands, and what the whole op returns."""

    call: OpCall
    operands: tuple[Tensor, ...]
    results: tuple[Any, ...]


def sample(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpSample:
    """Run the whole op, and record its call."""
    graph = fx.Graph()
    operands: list[Tensor] = []

    def place(value: Tensor) -> fx.Node:
        node = graph.placeholder(f"operand_{len(operands)}")
        node.meta["val"] = value
        operands.append(value)
        return node

    node_args, node_kwargs = tree_map_only(Tensor, place, (tuple(args), dict(kwargs)))
    result = target(*args, **kwargs)
    node = graph.call_function(target, node_args, node_kwargs)
    node.meta["val"] = result
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return OpSample(op_call(node), tuple(operands), results)


def prove(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: int,
    strategies: Sequence[Strategy] | None = None,
    rule: Rule | None = None,
) -> list[Strategy]:
    """Prove `strategies` (all that the rule admits, if None) of one call, over one axis of `parts` ranks.

    `rule` is the op's own unless given. For tensors on the meta device only shapes and strides are proved. Returns the
    strategies proved.

    Raises:
        RuleDisprovedError: at the first strategy that is wrong.
    """
    rule = rule or rule_for(target)
    assert rule is not None, f"{target} has no rule"
    taken = sample(target, args, kwargs)
    if strategies is None:
        strategies = admissible(taken.call, rule, all_seeds(taken.call, parts))
    for strategy in strategies:
        _check_consistent(rule, taken.call, strategy)
        prove_layouts(rule, taken, {"x": strategy}, {"x": parts})
    return list(strategies)


def prove_two_axes(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], parts: int) -> int:
    """Prove all pairs of strategies that axes y and x, of `parts` ranks each, can take at once; return their number."""
    rule = rule_for(target)
    assert rule is not None, f"{target} has no rule"
    taken = sample(target, args, kwargs)
    strategies = admissible(taken.call, rule, all_seeds(taken.call, parts))
    pairs = [pair for pair in product(strategies, repeat=2) if _combine(taken.call, *pair)]
    for y, x in pairs:
        prove_layouts(rule, taken, {"y": y, "x": x}, {"y": parts, "x": parts})
    return len(pairs)


def _combine(call: OpCall, first: Strategy, second: Strategy) -> bool:
    """Whether two axes can take these strategies at once: no digit twice, no two kinds of partial values."""
    operands = zip(
        (*call.inputs, *call.outputs), (*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=True
    )
    return all(_coexist(shape or (), a, b) for shape, a, b in operands)


def _coexist(shape: Shape, first: Placement, second: Placement) -> bool:
    if isinstance(first, Partial) and isinstance(second, Partial):
        return first == second
    if not (isinstance(first, Shard) and isinstance(second, Shard) and first.dim == second.dim):
        return True
    low, high = sorted((first, second), key=lambda shard: shard.outer)
    size = shape[first.dim]
    return high.outer % (low.outer * low.parts) == 0 and low.fits(size) and high.fits(size)


def all_seeds(call: OpCall, parts: int) -> Iterator[tuple[Operand, Shard]]:
    """Every shard of every operand and result: starting anywhere in a dim, and uneven ones."""
    for role, shapes in (("input", call.inputs), ("output", call.outputs)):
        for index, shape in enumerate(shapes):
            for dim, size in enumerate(shape or ()):
                for outer in range(1, max(size, 1) + 1):
                    if outer == 1 or size % (outer * parts) == 0:
                        yield Operand("input" if role == "input" else "output", index), Shard(dim, parts, outer)


def _check_consistent(rule: Rule, call: OpCall, strategy: Strategy) -> None:
    """A rule must return the same strategy from any of its shards, else layouts depend on the search's order."""
    places = [(Operand("input", i), p) for i, p in enumerate(strategy.inputs)]
    places += [(Operand("output", i), p) for i, p in enumerate(strategy.outputs)]
    for operand, placement in places:
        if isinstance(placement, Shard):
            found = rule.extend(call, operand, placement)
            if found != strategy:
                again = describe(found) if found else "nothing"
                raise RuleDisprovedError(call, {"x": strategy}, f"from {operand} the rule finds {again}")


def prove_layouts(rule: Rule, taken: OpSample, chosen: Mapping[str, Strategy], sizes: Mapping[str, int]) -> None:
    """Prove that the strategies chosen for the axes together return the results of the whole op."""
    call = taken.call
    inputs = tuple(_layout(shape, {a: s.inputs[i] for a, s in chosen.items()}) for i, shape in enumerate(call.inputs))
    outputs = tuple(
        None if shape is None else _layout(shape, {a: s.outputs[i] for a, s in chosen.items()})
        for i, shape in enumerate(call.outputs)
    )
    if any(layout.is_partial and t.dtype == torch.bool for layout, t in zip(inputs, taken.operands, strict=True)):
        return  # booleans have no partial sums
    contributions = [_contributions(t, layout, sizes) for t, layout in zip(taken.operands, inputs, strict=True)]
    for dense in (False, True):
        runs, has_gaps = [], False
        for coordinate in _coordinates(sizes):
            operands = zip(contributions, inputs, strict=True)
            pieces = [_piece(whole, layout, coordinate, dense) for whole, layout in operands]
            has_gaps = has_gaps or not all(map(is_dense, pieces))
            runs.append((coordinate, _run_local(rule, call, inputs, outputs, coordinate, pieces)))
        problem = _problem(taken, outputs, runs)
        if problem:
            raise RuleDisprovedError(call, chosen, f"{problem} ({'dense' if dense else 'sliced'} operands)")
        if not has_gaps:
            return


def _layout(shape: Shape, placements: Mapping[str, Placement]) -> Layout:
    layout = Layout(shape)
    for axis, placement in placements.items():
        layout = layout.with_placement(axis, placement)
    return layout


def _coordinates(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    return [dict(zip(sizes, index, strict=True)) for index in product(*map(range, sizes.values()))]


def _contributions(
    whole: Tensor, layout: Layout, sizes: Mapping[str, int]
) -> dict[tuple[tuple[str, int], ...], Tensor]:
    """The operand at each coordinate of the partial axes: random values whose sum, or maximum, is the whole."""
    partial = {axis: p.op for axis, p in layout.axes if isinstance(p, Partial)}
    keys = [tuple(c.items()) for c in _coordinates({axis: sizes[axis] for axis in partial})]
    if not partial:
        return {(): whole}
    is_counted = not (whole.is_floating_point() or whole.is_complex())
    noise = [torch.randint_like(whole, 9) if is_counted else torch.randn_like(whole) for _ in keys]
    if "sum" in partial.values():
        noise[-1] = whole - torch.stack(noise[:-1]).sum(0)
        return dict(zip(keys, noise, strict=True))
    owner = torch.randint_like(whole, len(keys))
    return {key: torch.where(owner == i, whole, whole - noise[i].abs()) for i, key in enumerate(keys)}


def _piece(
    contributions: Mapping[tuple[tuple[str, int], ...], Tensor], layout: Layout, coordinate: Coordinate, dense: bool
) -> Tensor:
    """A rank's shard in the stride order of the whole: a view of that if it is in this order, or a dense copy."""
    partial = tuple((a, coordinate[a]) for a in coordinate if isinstance(layout.placement(a), Partial))
    whole = contributions[partial]
    piece = shard_of(whole, layout, coordinate)
    order = stride_order(whole)
    if dense or not _lies_like(piece, whole):
        return piece.permute(order).contiguous().permute(inverse(order))
    return piece


def _run_local(
    rule: Rule,
    call: OpCall,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout | None, ...],
    coordinate: Coordinate,
    pieces: Sequence[Tensor],
) -> tuple[Any, ...]:
    """Emit the op for one rank, and run it on that rank's shards."""
    graph = fx.Graph()
    operands = iter([graph.placeholder(f"operand_{i}") for i in range(len(pieces))])
    args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), lambda _: next(operands))
    graph.output(rule.emit(LocalOp(call, graph, args, kwargs, inputs, outputs, coordinate)))
    result = fx.Interpreter(torch.nn.Module(), graph=graph).run(*pieces)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _problem(
    taken: OpSample, layouts: Sequence[Layout | None], runs: Sequence[tuple[Coordinate, tuple[Any, ...]]]
) -> str | None:
    """What is wrong with the local results, if anything is."""
    for index, layout in enumerate(layouts):
        if layout is None:
            continue
        whole = taken.results[index]
        has_values = not whole.is_meta and taken.call.target not in _UNINITIALIZED
        for coordinate, results in runs:
            problem = _shape_problem(results[index], whole, layout.local_shape(coordinate))
            if problem is None and has_values and not layout.is_partial:
                problem = _value_problem(results[index], shard_of(whole, layout, coordinate), taken)
            if problem:
                return f"result {index} at {dict(coordinate)}: {problem}"
        if has_values and layout.is_partial:
            named = {axis for axis, _ in layout.axes}
            pieces = [(c, r[index]) for c, r in runs if not any(c[a] for a in c if a not in named)]
            problem = _value_problem(assemble(pieces, layout), whole, taken)
            if problem:
                return f"result {index}, reduced: {problem}"
    return None


def _shape_problem(local: Tensor, whole: Tensor, shape: Shape) -> str | None:
    if tuple(local.shape) != shape or local.dtype != whole.dtype:
        return f"expected {whole.dtype} {list(shape)}, found {local.dtype} {list(local.shape)}"
    if not _lies_like(local, whole):
        return f"expected strides in the order of the whole {whole.stride()}, found {local.stride()}"
    return None


def _lies_like(local: Tensor, whole: Tensor) -> bool:
    """Whether both have the same stride order; strides of dims that are expanded, or of size 1, are ignored."""
    found, expected = local.stride(), whole.stride()
    dims = [dim for dim, size in enumerate(local.shape) if size > 1 and expected[dim] > 0]
    return sorted(dims, key=lambda dim: -found[dim]) == sorted(dims, key=lambda dim: -expected[dim])


def _value_problem(found: Tensor, expected: Tensor, taken: OpSample) -> str | None:
    if not expected.is_floating_point():
        return None if torch.equal(found, expected) else "values differ"
    involved = [t for t in (expected, *taken.operands) if t.numel() > 0]
    scale = max([1.0, *(float(t.double().nan_to_num(0, 0, 0).abs().max()) for t in involved)])
    tolerance = scale * max((_TOLERANCE.get(t.dtype, 0.0) for t in involved), default=0.0)
    if torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True):
        return None
    return f"largest difference {(found - expected).abs().max():.3g}, expected at most {tolerance:.3g}"
