"""The kernels, their signals and the tuner on a real GPU, and the ops on ranks that each have one, or share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpar.world.launch import run_ranks
from tests.lowering.triton.products import assert_product
from tests.support.gpu_ranks import on_gpus

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: kernels are interpreted and compiled only"
    ),
]

PARTS = 8
SHAPES = [(1024, 512, 256), (1008, 496, 208), (64, 4096, 4096), (64, 488, 200), (16, 24, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_rows_are_multiplied_as_they_arrive_by_every_tiling(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    from fxpar.bench.fused.rank_on_one_gpu import GatherOnOneGpu
    from fxpar.lowering.triton.plan import Fused

    case = GatherOnOneGpu.random(m, n, k, PARTS, dtype)
    whole = torch.cat([case.own, *(piece.cuda() for piece in case.remote)])
    for tiling in _possible("gather", dtype, n, k):
        preset = None
        for segment_rows in (m // PARTS, -(-m // PARTS // 3)):
            case.gathered.fill_(torch.nan)
            case.out.fill_(torch.nan)
            case.fused(Fused(tiling, segment_rows))
            torch.cuda.synchronize()
            assert_product(case.out.cpu(), whole.cpu(), case.right.cpu())
            fused = case.out.clone()
            case.multiply(Fused(tiling, segment_rows))
            assert case.out.equal(fused), "signals that were there before change a bit"
            preset = fused if preset is None else preset
            assert fused.equal(preset), "the size of segments changes a bit"


def test_a_hundred_calls_of_varying_sizes_beside_delays_are_right() -> None:
    from fxpar.bench.fused.rank_on_one_gpu import GatherOnOneGpu
    from fxpar.lowering.triton.plan import Fused

    tiling = _possible("gather", torch.bfloat16, 256, 128)[0]
    cases = [GatherOnOneGpu.random(m, 256, 128, PARTS, torch.bfloat16) for m in (64, 328, 1024, 2048)]
    draw = torch.Generator().manual_seed(0)
    for call in range(100):
        case = cases[call % 4]
        case.gathered.fill_(torch.nan)
        with torch.cuda.stream(case.copies):
            torch.cuda._sleep(int(torch.randint(0, 200_000, (), generator=draw)))
        case.fused(Fused(tiling, 1 + call % 50))
    torch.cuda.synchronize()
    for case in cases:
        assert_product(case.out.cpu(), torch.cat([case.own.cpu(), *case.remote]), case.right.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_rows_are_counted_when_they_are_stored_by_every_tiling(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    from fxpar.bench.fused.rank_on_one_gpu import ScatterOnOneGpu
    from fxpar.lowering.triton.plan import Fused

    case = ScatterOnOneGpu.random(m, n, k, PARTS, dtype)
    for tiling in _possible("scatter", dtype, n, k):
        case.staging.fill_(torch.nan)
        case.remote.fill_(torch.nan)
        torch.cuda.synchronize()
        case.fused(case.call(Fused(tiling)), Fused(tiling))
        torch.cuda.synchronize()
        assert_product(case.product().cpu(), case.left.cpu(), case.right.cpu())
        assert case.remote[1:].equal(case.staging[1:].cpu())


@pytest.mark.parametrize("offset", [11, 12])
@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((1 << 20,), (1,)), ((64, 33, 5), (1000, 7, 1)), ((64, 33, 1028), (1 << 20, 2000, 1)), ((3,), (1 << 40,))],
)
def test_numbers_by_logical_index_are_those_of_the_cpu(
    sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    from fxpar.ir.random import random_state
    from fxpar.lowering.triton import register_on_gpus

    register_on_gpus()
    (stream,) = torch.ops.fxpar.streams(random_state(2**62 + 7, 3, 5, 1), [1 << 25])
    arguments = list(sizes), list(sizes), list(strides), offset, 1 << 44
    expected = torch.ops.fxpar.uniform(stream, *arguments)
    assert torch.ops.fxpar.uniform(stream.cuda(), *arguments).cpu().equal(expected)


def test_what_a_stream_does_is_timed_when_it_does_it() -> None:
    from fxpar.runtime.clock import clock_of

    clock = clock_of("cuda")
    begin = clock.now()
    torch.cuda._sleep(100_000_000)
    end = clock.now()
    torch.cuda.synchronize()
    assert 1e4 < clock.us(end) - clock.us(begin) < 1e6, "the host itself is done at once"


def test_a_row_of_the_benchmark_has_all_times() -> None:
    from fxpar.bench.fused.one_gpu import Shape, one_gpu_rows

    for row in one_gpu_rows([Shape("gather", 512, 512, 512), Shape("scatter", 512, 512, 512)], torch.bfloat16, print):
        assert all(float(row[name]) > 0 for name in row if name.endswith("_us") and "communication" not in name)


def test_the_ops_give_what_they_are_by_definition() -> None:
    run_ranks(4, on_gpus, compare_with_definitions)


def compare_with_definitions() -> None:
    """All three ops in all ways that the tuner chooses from, on ranks that use each other's memory. For `on_gpus`."""
    from fxpar.lowering.triton.gather import Gather, gather_and_multiply
    from fxpar.lowering.triton.plan import Fused
    from fxpar.lowering.triton.scatter import Product, multiply_and_reduce, multiply_and_scatter
    from fxpar.lowering.triton.workspace import Workspace

    rank, parts = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    workspace = Workspace(group.group_name, torch.device("cuda", torch.cuda.current_device()))
    for call, (m, n, k) in enumerate([(64, 48, 32), (200, 72, 40), (1024, 512, 256), (8, 16, 8)] * 10):
        draw = torch.Generator().manual_seed(call)
        left, right = torch.randn(m * parts, k, generator=draw), torch.randn(k, n, generator=draw)
        shard = left.chunk(parts)[rank].cuda()
        how = Fused(_possible("scatter", torch.float32, n, k)[-1], 1 + call % m, pushes=call % 3 == 0)
        gather = Gather.of(shard, "rows", 1, parts)
        (product,), gathered = gather_and_multiply(gather, [right.cuda()], [None], "rows", how, workspace)
        assert gathered.cpu().equal(left)
        assert_product(product.cpu(), left, right)
        lefts = [torch.randn(m * parts, k, generator=draw) for _ in range(parts)]
        scattered = Product.of(lefts[rank].cuda(), right.cuda(), None, "rows", 1, parts)
        whole = torch.cat(lefts, 1), torch.cat([right] * parts)
        piece = multiply_and_scatter(scattered, how, workspace)
        assert_product(piece.cpu(), whole[0].chunk(parts)[rank], whole[1])
        reduced = Product.of_all(lefts[rank].cuda()[1:], right.cuda(), None, parts)
        assert_product(multiply_and_reduce(reduced, how, workspace).cpu(), whole[0][1:], whole[1])


def _possible(op: Any, dtype: torch.dtype, n: int, k: int) -> list[Any]:
    from fxpar.lowering.triton.decide import possible_tilings

    device = torch.device("cuda", torch.cuda.current_device())
    return possible_tilings(op, dtype, device, vectors=n % 16 == 0 and k % 16 == 0, matrices=1)
