"""Choose where stages begin, so that each has about the same work and few bytes cross the boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from fxpar.costs.prices import Prices
from fxpar.errors import InvalidStagesError
from fxpar.graph.shared_values import is_context, recomputable
from fxpar.ir.capture import Capture, example, is_marker
from fxpar.ir.node_meta import module_path
from fxpar.passes.split_stages import operations


def balance_stages(capture: Capture, num_stages: int, prices: Prices) -> tuple[str, ...]:
    """Paths of the modules that open the second and later of `num_stages` stages.

    Minimises the time of the slowest stage: FLOPs and bytes of its operations, plus the bytes that enter it. Cuts
    fall only where a module begins, so that they have a name.

    Raises:
        InvalidStagesError: the forward runs through too few modules.
    """
    if num_stages == 1:
        return ()
    nodes = [node for node in capture.module.graph.nodes if node.op not in ("placeholder", "output")]
    times = _prefix_sums(_node_times(capture, nodes, prices))
    starts = _places_to_cut(capture, nodes)
    if len(starts) < num_stages - 1:
        raise InvalidStagesError(
            f"stages: {num_stages} stages need {num_stages - 1} places to cut, but the forward of the model runs "
            f"through {len(starts)} modules with work of their own after the first; use fewer stages (mesh axis pipe)"
        )
    entering = {position: _bytes_across(nodes, position) / prices.edge_bytes_per_us for position in starts}
    cuts = _split(times, entering, num_stages)
    return tuple(starts[position] for position in cuts)


def _places_to_cut(capture: Capture, nodes: Sequence[fx.Node]) -> dict[int, str]:
    """The module starts with work before each of them that no other stage repeats: no choice leaves a stage idle."""
    ordered = operations(capture)
    repeated = recomputable(ordered, capture.sources)
    own = {node for node in ordered if node not in repeated and not is_context(node)}
    places: dict[int, str] = {}
    before = 0
    for position, name in _module_starts(nodes).items():
        if own.intersection(nodes[before:position]):
            places[position] = name
            before = position
    return places


def _module_starts(nodes: Sequence[fx.Node]) -> dict[int, str]:
    """Position -> the outermost module that begins there, for modules whose nodes were not met before."""
    starts: dict[int, str] = {}
    seen: set[str] = set()
    for position, node in enumerate(nodes):
        path = module_path(node).split(".") if module_path(node) else []
        prefixes = [".".join(path[: depth + 1]) for depth in range(len(path))]
        fresh = [prefix for prefix in prefixes if prefix not in seen]
        seen.update(prefixes)
        if fresh and position > 0:
            starts[position] = fresh[0]
    return starts


def _node_times(capture: Capture, nodes: Sequence[fx.Node], prices: Prices) -> list[float]:
    """Estimated forward time of each node in microseconds; the backward takes about twice as long for every node."""
    with FlopCounterMode(display=False) as counter:
        return [_node_time(node, capture, prices, counter) for node in nodes]


def _node_time(node: fx.Node, capture: Capture, prices: Prices, counter: FlopCounterMode) -> float:
    is_border = node in capture.sources or is_marker(node, "exit")
    if is_border or node.op not in ("call_function", "call_method"):
        return 0.0
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return 0.0
    before = counter.get_total_flops()
    _run(node, value)
    flops = counter.get_total_flops() - before
    return prices.arithmetic_us(flops, value.dtype) + 2 * value.nbytes / prices.memory_bytes_per_us


def _run(node: fx.Node, value: Tensor) -> None:
    """Run one node on fake tensors, for the FLOP counter to see."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta.get("example_value"))
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]  # every example value is a FakeTensor
        if isinstance(node.target, str):
            getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)


def _bytes_across(nodes: Sequence[fx.Node], position: int) -> int:
    before, after = set(nodes[:position]), set(nodes[position:])
    crossing = {node for node in before if any(user in after for user in node.users)}
    values = [example(node) for node in crossing if isinstance(node.meta.get("example_value"), torch.Tensor)]
    return sum(value.nbytes for value in values if value.requires_grad)


def _prefix_sums(times: Sequence[float]) -> list[float]:
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    return sums


def _split(times: Sequence[float], entering: dict[int, float], num_stages: int) -> tuple[int, ...]:
    """The cuts that minimise the slowest stage; dynamic programming over the allowed positions."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(num_stages - 1):
        best = {
            cut: min(
                (max(worst, _cost(times, entering, start, cut)), (*cuts, cut))
                for start, (worst, cuts) in best.items()
                if start < cut
            )
            for cut in entering
            if any(start < cut for start in best)
        }
    end = len(times) - 1
    _, cuts = min((max(worst, _cost(times, entering, start, end)), cuts) for start, (worst, cuts) in best.items())
    assert all(a < b for a, b in pairwise(cuts)), f"cuts out of order: {cuts}"
    return cuts


def _cost(times: Sequence[float], entering: dict[int, float], start: int, end: int) -> float:
    return times[end] - times[start] + entering.get(start, 0.0)
