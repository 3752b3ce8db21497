"""What ranks do to prove the collectives of CPU tensors; apart from the tests, so that they start without pytest."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch.distributed import c10d_functional
from fxpar.errors import PeerLostError
from fxpar.lowering import cpu_collectives, lower
from tests.lowering.cpu.run_fused import live_on
from tests.lowering.graphs import traced

CALLS: dict[str, Callable[[Tensor, int, str], Tensor]] = {
    "sum": lambda value, parts, group: cpu_collectives.all_reduce(value, "sum", group),
    "max": lambda value, parts, group: cpu_collectives.all_reduce(value, "max", group),
    "scattered sum": lambda value, parts, group: cpu_collectives.reduce_scatter(value, "sum", parts, group),
    "scattered max": lambda value, parts, group: cpu_collectives.reduce_scatter(value, "max", parts, group),
    "gather": cpu_collectives.all_gather,
    "exchange": lambda value, parts, group: cpu_collectives.all_to_all(value, *_equal(value, parts), group),
}


def _equal(value: Tensor, parts: int) -> tuple[list[int], list[int]]:
    sizes = [value.shape[0] // parts] * parts
    return sizes, sizes


def value_of(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What a rank contributes: whole numbers, whose sums are exact in any dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, tuple(shape), generator=generator).to(dtype)


def expected(kind: str, rank: int, ranks: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What a collective returns on `rank`, worked out in one process."""
    values = torch.stack([value_of(each, shape, dtype) for each in range(ranks)])
    pieces = values.view(ranks, ranks, shape[0] // ranks, *shape[1:])
    match kind:
        case "sum":
            return values.sum(0, dtype=dtype)
        case "max":
            return values.amax(0)
        case "scattered sum":
            return pieces[:, rank].sum(0, dtype=dtype)
        case "scattered max":
            return pieces[:, rank].amax(0)
        case "gather":
            return values.flatten(0, 1)
        case _:
            return pieces[:, rank].flatten(0, 1)


def wrong_results(hosts: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[str]:
    """The collectives that return anything else than they should, among all kinds at the same time."""
    live_on(hosts)
    group, rank, ranks = dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size()
    wrong = []
    for shape in shapes:
        for dtype in dtypes:
            started = {kind: call(value_of(rank, shape, dtype), ranks, group) for kind, call in CALLS.items()}
            for kind in reversed(started):  # in another order than they began
                found = c10d_functional.wait_tensor(started[kind])
                right = expected(kind, rank, ranks, shape, dtype)
                if not torch.equal(found, right) or not found.is_contiguous():
                    wrong.append(f"{kind} of {dtype} {shape}: {found} instead of {right}")
    return wrong


def rounded_sums() -> tuple[Tensor, Tensor]:
    """A sum that rounds, and this rank's piece of it by a reduce-scatter."""
    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    own = rounding_value(dist.get_rank())
    total = cpu_collectives.all_reduce(own, "sum", group)
    piece = cpu_collectives.reduce_scatter(own, "sum", ranks, group)
    return c10d_functional.wait_tensor(total), c10d_functional.wait_tensor(piece)


def rounding_value(rank: int) -> Tensor:
    """What a rank contributes to `rounded_sums`."""
    return torch.randn(1200, generator=torch.Generator().manual_seed(rank))


def sums_in_groups() -> list[float]:
    """Sums in groups that share ranks, begun in one order and waited for in another, a hundred times."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    mine = [group for group in [*pairs, dist.group.WORLD] if dist.get_rank(group) >= 0]
    found = []
    for number in range(100):
        own = torch.full((1000,), float(number + dist.get_rank()))
        started = [cpu_collectives.all_reduce(own, "sum", group.group_name) for group in mine]
        found += [c10d_functional.wait_tensor(each)[-1].item() for each in reversed(started)]
    return found


def scatter_in_two_graphs() -> Tensor:
    """A reduce-scatter that one graph starts and another waits for, with none of its values held in between."""
    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    given = value_of(dist.get_rank(), [2 * ranks, 5], torch.float32)
    start = traced(lambda x: (c10d_functional.reduce_scatter_tensor(x, "sum", ranks, group),), given)
    finish = traced(lambda started: (c10d_functional.wait_tensor(started),), torch.empty(2, 5))
    under_way = lower("aten")(start)(given)
    del given
    gc.collect()
    (found,) = lower("aten")(finish)(*under_way)
    return found.clone()


def lose_a_rank(doomed: int) -> str:
    """The error of a rank whose pair loses `doomed`, when that dies with a sum under way; "" if it loses none."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    (group,) = [pair for pair in pairs if dist.get_rank(pair) >= 0]
    own = torch.ones(3)
    c10d_functional.wait_tensor(cpu_collectives.all_reduce(own, "sum", group.group_name))
    if dist.get_rank() == doomed:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        c10d_functional.wait_tensor(cpu_collectives.all_reduce(own, "sum", group.group_name))
    except PeerLostError as error:
        return str(error)
    return ""
