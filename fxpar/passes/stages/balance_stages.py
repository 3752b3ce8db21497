"""Choose where stages begin, so that each has about the same work and few bytes cross the boundaries."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from fxpar._torch.amp import enter_autocast, exit_autocast
from fxpar._torch.compiler import FakeTensor
from fxpar._torch.flops import FlopCounterMode
from fxpar.costs.prices import Prices
from fxpar.errors import InvalidStagesError
from fxpar.graph.describe import describe, describe_call
from fxpar.graph.shared_values import is_context, recomputable
from fxpar.ir.capture import Capture
from fxpar.ir.markers import is_marker
from fxpar.ir.node_meta import is_wrapped, known_value, module_path
from fxpar.passes.stages.changed_edges import ChangesAcross
from fxpar.progress.phases import as_phase


@as_phase
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
            f"through {len(starts)} modules at which one may begin: with work of its own after the first, and no "
            "tensor that is on both sides and changed in place; use fewer stages (mesh axis "
            "pipe), or write changes out of place"
        )
    across = _bytes_across(nodes)
    entering = {position: across[position] / prices.edge_bytes_per_us for position in starts}
    cuts = _split(times, entering, num_stages)
    return tuple(starts[position] for position in cuts)


def _places_to_cut(capture: Capture, nodes: Sequence[fx.Node]) -> dict[int, str]:
    """The module starts with work before each of them that no other stage repeats: no choice leaves a stage idle.

    Nor is there one between a change in place and other uses of the same memory, such as that of a buffer.
    """
    ordered = capture.operations()
    repeated = recomputable(ordered, capture.sources)
    own = {node for node in ordered if node not in repeated and not is_context(node)}
    wrapped, across = _wrapped_across(nodes), ChangesAcross(capture, repeated)
    places: dict[int, str] = {}
    before = 0
    for position, name in _module_starts(nodes).items():
        is_allowed = position not in wrapped and not across.forbids(position)
        if is_allowed and own.intersection(nodes[before:position]):
            places[position] = name
            before = position
    return places


def _wrapped_across(nodes: Sequence[fx.Node]) -> set[int]:
    """The positions that values cross which only exist within a `torch.func` transform, such as vmap."""
    positions: set[int] = set()
    for node, position, last in _lifetimes(nodes):
        if is_wrapped(node):
            positions.update(range(position + 1, last + 1))
    return positions


def _lifetimes(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, int, int]]:
    """Each node, its position, and that of its last user: its own, if there is none."""
    place = {node: position for position, node in enumerate(nodes)}
    for node, position in place.items():
        yield node, position, max((place[user] for user in node.users if user in place), default=position)


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
    """Estimated forward time of each node in microseconds; the backward takes about twice as long for every node.

    Equal ops on equal values are timed once.
    """
    known: dict[str, float] = {}
    times = []
    with FlopCounterMode(display=False) as counter, _Autocasts() as autocasts:
        for node in nodes:
            autocasts.follow(node)
            value = node.meta.get("example_value")
            is_border = node in capture.sources or is_marker(node, "exit")
            if is_border or node.op not in ("call_function", "call_method") or not isinstance(value, Tensor):
                times.append(0.0)
                continue
            call = describe_call(node, {used: describe(known_value(used)) for used in node.all_input_nodes})
            kind = f"{autocasts} {call}"
            if kind not in known:
                known[kind] = _node_time(node, value, prices, counter)
            times.append(known[kind])
    return times


class _Autocasts:
    """The autocast contexts that a graph is in, as its nodes are followed: ops that are run then are run in them."""

    def __init__(self) -> None:
        self._entered: dict[fx.Node, Any] = {}

    def __enter__(self) -> _Autocasts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._entered:
            self._leave()

    def __str__(self) -> str:
        return str([node.args for node in self._entered])

    def follow(self, node: fx.Node) -> None:
        """Enter or leave a context if `node` does."""
        if node.target is enter_autocast:
            self._entered[node] = enter_autocast(*node.args)
        elif node.target is exit_autocast:
            self._leave()

    def _leave(self) -> None:
        _, entered = self._entered.popitem()
        exit_autocast(entered)


def _node_time(node: fx.Node, value: Tensor, prices: Prices, counter: FlopCounterMode) -> float:
    before = counter.get_total_flops()
    # Within a `torch.func` transform values are wrapped, and ops on them do not run outside of it.
    if isinstance(value, FakeTensor) and not any(map(is_wrapped, node.all_input_nodes)):
        _run(node, value)
    flops = counter.get_total_flops() - before
    return prices.arithmetic_us(flops, value.dtype) + 2 * value.nbytes / prices.memory_bytes_per_us


def _run(node: fx.Node, value: FakeTensor) -> None:
    """Run one node on fake tensors, for the FLOP counter to see."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta.get("example_value"))
    with value.fake_mode, torch.no_grad():
        if isinstance(node.target, str):
            getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)


def _bytes_across(nodes: Sequence[fx.Node]) -> list[int]:
    """For each position, the bytes of the values that are computed before it, used after it, and have a gradient."""
    changes = [0] * (len(nodes) + 1)
    for node, position, last in _lifetimes(nodes):
        value = node.meta.get("example_value")
        if last > position and isinstance(value, Tensor) and value.requires_grad:
            changes[position + 1] += value.nbytes
            changes[last + 1] -= value.nbytes
    return list(accumulate(changes))


def _prefix_sums(times: Sequence[float]) -> list[float]:
    return list(accumulate(times, initial=0.0))


def _split(times: Sequence[float], entering: Mapping[int, float], num_stages: int) -> tuple[int, ...]:
    """The cuts that minimise the slowest stage; dynamic programming over the allowed positions.

    Of equally good ones, those whose first cut comes first, then the second, and so on.
    """
    starts = sorted(entering)
    best = _Best([0], [0.0], [()], times, entering)
    for _ in range(num_stages - 1):
        found = [(cut, *best.before(cut)) for cut in starts if cut > best.starts[0]]
        cuts = [(*earlier, cut) for cut, _, earlier in found]
        best = _Best([cut for cut, _, _ in found], [worst for _, worst, _ in found], cuts, times, entering)
    _, chosen = best.before(len(times) - 1)
    assert all(a < b for a, b in pairwise(chosen)), f"cuts out of order: {chosen}"
    return chosen


class _Best:
    """The best cuts before each position where the next stage may start.

    Args:
        starts: these positions, ascending.
        worst: the time of the slowest stage before each of them.
        cuts: where the stages before begin, and the next one.
        times, entering: as in `_split`.
    """

    def __init__(
        self,
        starts: Sequence[int],
        worst: Sequence[float],
        cuts: Sequence[tuple[int, ...]],
        times: Sequence[float],
        entering: Mapping[int, float],
    ) -> None:
        self.starts, self._cuts, self._times = starts, cuts, times
        self._worst = np.asarray(worst)
        self._times_before = np.asarray([times[start] for start in starts])
        self._entering = np.asarray([entering.get(start, 0.0) for start in starts])
        self._preference = np.argsort(sorted(range(len(cuts)), key=cuts.__getitem__))

    def before(self, end: int) -> tuple[float, tuple[int, ...]]:
        """The time of the slowest stage, and the cuts, if the next stage ends at `end`."""
        ahead = bisect_left(self.starts, end)
        own = self._times[end] - self._times_before[:ahead] + self._entering[:ahead]
        slowest = np.maximum(self._worst[:ahead], own)
        worst = slowest.min()
        (equal,) = np.nonzero(slowest == worst)
        return float(worst), self._cuts[int(equal[np.argmin(self._preference[equal])])]
