"""Matrix products with a collective before or after them, and the ways to compute both: sequentially, and fused.

m, k and n are the rows, the inner dim and the columns of a product; p is the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch.distributed import c10d_functional
from fxpar.bench.fused.matmuls import Multiply, matmuls
from fxpar.bench.measure.interleaved import Step
from fxpar.ir.fused_ops import all_gather_matmul, matmul_reduce_scatter
from fxpar.lowering.cpu_collectives import exchange_and_reduce
from fxpar.world.hosts import discover_hosts

Variant: TypeAlias = Callable[[], Tensor]
"""One way to compute a case; a collective of all ranks."""

BEST_MATMUL = "best matmul"
"""The matmul of the gathered value, or without the scatter: the fastest of `MATMULS` on this machine."""

COLLECTIVES = ("gloo alone", "exchange alone")
SEQUENCES = ("gloo in turn", "exchange in turn")
"""The collective and the best matmul, one after the other. "exchange" is fxpar's reduce-scatter in place of gloo's."""

GLOO, FUSED = SEQUENCES[0], "fused"


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals of a case.

    of_matmul: the most that fused may take, in units of the best matmul. of_gloo: the least speed-up of fused over gloo
    in turn. efficiency: the least overlap efficiency.
    """

    of_matmul: float | None = None
    of_gloo: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True, slots=True)
class FusedCase:
    """A product with a collective before or after it.

    Args:
        op: "gather": each of p ranks has m/p rows of the left factor, and multiplies all of them by n/p columns.
            "scatter": each rank multiplies k/p columns by k/p rows, and has m/p rows of the sum of all products.
        calls: how often a step computes it; many if it is short, so that its time can be measured.
        repeats: how many steps are timed: fifteen of a fraction of a second, whose median is as steady as that of fewer
            long ones.
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

    def matmuls(self) -> dict[str, Variant]:
        """Every way to multiply on this rank, without the collective."""
        factors = _factors(self)
        return {name: partial(multiply, factors.left) for name, multiply in factors.matmuls(self).items()}

    def ways(self, matmul: str) -> dict[str, Variant]:
        """All other ways on this rank, with the given one of `MATMULS`. Ways that compute the same value differ by
        rounding only."""
        factors = _factors(self)
        return (_gather_ways if self.op == "gather" else _scatter_ways)(factors, factors.matmuls(self)[matmul])

    def steps(self, ways: Mapping[str, Variant]) -> dict[str, Step]:
        """A step of every way, which calls it `calls` times."""
        return {name: partial(_repeat, way, self.calls) for name, way in ways.items()}


def _repeat(way: Variant, calls: int) -> None:
    for _ in range(calls):
        way()


@dataclass(frozen=True, slots=True)
class _Factors:
    """The factors of this rank, the right one transposed like a layer's weight, and its shard of the left one."""

    left: Tensor
    right: Tensor
    shard: Tensor

    def matmuls(self, case: FusedCase) -> dict[str, Multiply]:
        return matmuls(case.op, self.right, case.m, discover_hosts())


def _factors(case: FusedCase) -> _Factors:
    rank, parts, _ = _place()
    if case.op == "gather":
        left, weight = _random(0, case.m, case.k), _random(1 + rank, case.n // parts, case.k)
    else:
        left, weight = _random(2 * rank, case.m, case.k // parts), _random(2 * rank + 1, case.n, case.k // parts)
    return _Factors(left, weight.t(), left.chunk(parts)[rank])


def _gather_ways(factors: _Factors, multiply: Multiply) -> dict[str, Variant]:
    _, parts, group = _place()
    whole, right, shard = factors.left, factors.right, factors.shard

    def gather() -> Tensor:
        return _waited_for(c10d_functional.all_gather_into_tensor(shard, parts, group))

    return {
        BEST_MATMUL: lambda: multiply(whole),
        COLLECTIVES[0]: gather,
        SEQUENCES[0]: lambda: multiply(gather()),
        FUSED: lambda: all_gather_matmul(shard, [right], [None], "rows", 1, parts, False, group)[0],
    }


def _scatter_ways(factors: _Factors, multiply: Multiply) -> dict[str, Variant]:
    _, parts, group = _place()
    left, right = factors.left, factors.right
    product = multiply(left).clone()

    def reduce(term: Tensor) -> Tensor:
        return _waited_for(c10d_functional.reduce_scatter_tensor(term, "sum", parts, group))

    def exchange(term: Tensor) -> Tensor:
        return _waited_for(exchange_and_reduce(term, "sum", parts, group))

    return {
        BEST_MATMUL: lambda: multiply(left),
        COLLECTIVES[0]: lambda: reduce(product),
        COLLECTIVES[1]: lambda: exchange(product),
        SEQUENCES[0]: lambda: reduce(multiply(left)),
        SEQUENCES[1]: lambda: exchange(multiply(left)),
        FUSED: lambda: matmul_reduce_scatter(left, right, None, "rows", 1, parts, group),
    }


def _waited_for(started: Tensor) -> Tensor:
    result: Tensor = c10d_functional.wait_tensor(started)
    return result


def _place() -> tuple[int, int, str]:
    """This rank, the number of ranks, and the name of their group."""
    world = dist.group.WORLD
    assert world is not None, "a case runs on ranks"
    return dist.get_rank(), dist.get_world_size(), world.group_name


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# On one host a collective is a copy in memory. With n = k = 1024 it takes half as long as the product, so that there is
# something to hide; with FLUX's wide dim (below) it would take 1%. m is one of FLUX's.
# Twelve calls make a step of a quarter of a second: the processor time of others is counted in hundredths.
_GATHER = FusedCase("gather", 2048, 1024, 1024, Goals(of_matmul=1.10, of_gloo=1.4), calls=12)
_SCATTER = FusedCase("scatter", 2048, 1024, 1024, Goals(of_matmul=1.20, of_gloo=1.5), calls=12)

ON_THIS_MACHINE = (
    _GATHER,
    _SCATTER,
    # As few rows as in decoding, with next to nothing to hide behind: no goal, since FLUX is slower there, too.
    replace(_GATHER, m=64, goals=Goals(), calls=200),
    replace(_SCATTER, m=64, goals=Goals(), calls=200),
)

# FLUX has (n, k) = (49152, 12288) where it gathers, (12288, 49152) where it scatters, m = 1024 to 8192, eight ranks.
# - 49152 and m = 2048 are its own.
# - 1024 in place of 12288: with 12288, a product that a GPU computes in a millisecond would take two cores half a
#   minute, and links at which communication takes as long would be twelve times as slow.
# - Four ranks and two in place of eight, since there are two cores. If four ranks share them, each message that arrives
#   switches between ranks, which then fill their caches anew; two ranks have a core each, as on real hosts.
# - One call per step takes seconds, so that seven repeats are half a minute for each way.
_WIDE, _NARROW = 49152, 1024
BETWEEN_HOSTS = tuple(
    case
    for ranks in (4, 2)
    for case in (
        FusedCase("gather", 2048, _NARROW, _WIDE, Goals(efficiency=0.85), repeats=7, ranks=ranks),
        FusedCase("scatter", 2048, _WIDE, _NARROW, Goals(efficiency=0.85), repeats=7, ranks=ranks),
    )
)
CASES: Mapping[str, tuple[FusedCase, ...]] = {"here": ON_THIS_MACHINE, "emulate": BETWEEN_HOSTS}
"""What each mode measures."""


def overlap_efficiency(fused: float, in_turn: float) -> float:
    """The share of the communication that is hidden; both times are in units of the best matmul's.

    NaN if there was nothing to hide.
    """
    return 1 - (fused - 1) / (in_turn - 1) if in_turn > 1 else math.nan
