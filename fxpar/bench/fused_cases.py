"""Products of matrices beside a collective, on some ranks, and the ways to compute them: in turn, and fused.

m, k and n are the rows, the inner dim and the columns of a product; p is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch import c10d_functional
from fxpar.bench.turns import Step
from fxpar.lowering.cpu_collectives import exchange_and_reduce
from fxpar.lowering.ops import all_gather_matmul, matmul_reduce_scatter

Way: TypeAlias = Callable[[], Tensor]
"""Computes something on this rank, together with all others."""

MATMULS = ("matmul", "matmul, right factor transposed")
"""Of the gathered value, or without the scatter. The fastest of them is the best that a product can take."""

COLLECTIVES = ("gloo alone", "exchange alone")
SEQUENCES = ("gloo in turn", "exchange in turn")
"""The collective and the matmul, one after the other; an exchange is what fxpar has in place of gloo's own."""

GLOO, FUSED = SEQUENCES[0], "fused"


@dataclass(frozen=True, slots=True)
class Goals:
    """What a case must show: at most so much of the best matmul, at least so much of gloo's way, and efficiency."""

    of_matmul: float | None = None
    of_gloo: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A product with a collective before or after it.

    Args:
        op: "gather": each of p ranks has m/p rows of the left factor, and multiplies all of them by n/p columns.
            "scatter": each rank multiplies k/p columns by k/p rows, and has m/p rows of the sum of all products.
        calls: how often a step computes it; many of what is short, so that its time can be told.
        repeats: how many steps are timed.
        ranks: p.
    """

    op: Literal["gather", "scatter"]
    m: int
    k: int
    n: int
    goals: Goals = Goals()
    calls: int = 1
    repeats: int = 15
    ranks: int = 4

    def __str__(self) -> str:
        op = "all-gather, matmul" if self.op == "gather" else "matmul, reduce-scatter"
        return f"{op}, {self.ranks} ranks, m={self.m}, k={self.k}, n={self.n}"

    def ways(self) -> dict[str, Way]:
        """All of them, on this of all ranks. Whatever computes the same gives the same, but for rounding."""
        return (_gather_ways if self.op == "gather" else _scatter_ways)(self)

    def steps(self) -> dict[str, Step]:
        """Every way, as often as a step has it."""
        return {name: _repeated(way, self.calls) for name, way in self.ways().items()}


def _repeated(way: Way, calls: int) -> Step:
    def step() -> None:
        for _ in range(calls):
            way()

    return step


def _gather_ways(case: Case) -> dict[str, Way]:
    rank, parts, group = _place()
    whole, weight = _random(0, case.m, case.k), _random(1 + rank, case.n // parts, case.k)
    shard, right = whole.chunk(parts)[rank], weight.t()  # as a linear layer has it
    right_rows = right.contiguous()

    def gather() -> Tensor:
        return _waited_for(c10d_functional.all_gather_into_tensor(shard, parts, group))

    return {
        MATMULS[0]: lambda: whole @ right_rows,
        MATMULS[1]: lambda: whole @ right,
        COLLECTIVES[0]: gather,
        SEQUENCES[0]: lambda: gather() @ right,
        FUSED: lambda: all_gather_matmul(shard, [right], [None], "rows", 1, parts, False, group)[0],
    }


def _scatter_ways(case: Case) -> dict[str, Way]:
    rank, parts, group = _place()
    left, weight = _random(2 * rank, case.m, case.k // parts), _random(2 * rank + 1, case.n, case.k // parts)
    right = weight.t()
    right_rows = right.contiguous()
    product = left @ right

    def reduce(term: Tensor) -> Tensor:
        return _waited_for(c10d_functional.reduce_scatter_tensor(term, "sum", parts, group))

    def exchange(term: Tensor) -> Tensor:
        return _waited_for(exchange_and_reduce(term, "sum", parts, group))

    return {
        MATMULS[0]: lambda: left @ right_rows,
        MATMULS[1]: lambda: left @ right,
        COLLECTIVES[0]: lambda: reduce(product),
        COLLECTIVES[1]: lambda: exchange(product),
        SEQUENCES[0]: lambda: reduce(left @ right),
        SEQUENCES[1]: lambda: exchange(left @ right),
        FUSED: lambda: matmul_reduce_scatter(left, right, None, "rows", 1, parts, group),
    }


def _waited_for(started: Tensor) -> Tensor:
    result: Tensor = c10d_functional.wait_tensor(started)
    return result


def _place() -> tuple[int, int, str]:
    """This rank, how many there are, and the group of all of them."""
    world = dist.group.WORLD
    assert world is not None, "a case runs on ranks"
    return dist.get_rank(), dist.get_world_size(), world.group_name


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


_GATHER = Case("gather", 2048, 1024, 1024, Goals(of_matmul=1.10, of_gloo=1.4), calls=3)
_SCATTER = Case("scatter", 2048, 1024, 1024, Goals(of_matmul=1.20, of_gloo=1.5), calls=3)

ON_THIS_MACHINE = (
    _GATHER,
    _SCATTER,
    # So few rows, as in decoding, that there is next to nothing to hide behind.
    replace(_GATHER, m=64, goals=Goals(), calls=20),
    replace(_SCATTER, m=64, goals=Goals(), calls=20),
)

# So much to multiply that links which take as long are slow: what they cost the processors is little beside it.
_WIDE = 49152
_GATHER_BETWEEN_HOSTS = Case("gather", 2048, 1024, _WIDE, Goals(efficiency=0.85), repeats=7)
_SCATTER_BETWEEN_HOSTS = Case("scatter", 2048, _WIDE, 1024, Goals(efficiency=0.85), repeats=7)
BETWEEN_HOSTS = (
    _GATHER_BETWEEN_HOSTS,
    _SCATTER_BETWEEN_HOSTS,
    # Where four share two processors, each message that comes has them take turns, and thus fill their caches anew.
    replace(_GATHER_BETWEEN_HOSTS, n=_WIDE // 2, ranks=2),
    replace(_SCATTER_BETWEEN_HOSTS, k=_WIDE // 2, ranks=2),
)
CASES: Mapping[str, tuple[Case, ...]] = {"here": ON_THIS_MACHINE, "emulate": BETWEEN_HOSTS}
"""What each mode measures."""
