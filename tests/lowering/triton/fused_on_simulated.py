"""What each rank does with its simulated GPU: fused ops of several sizes, one after another, with no wait between.

TRITON_INTERPRET=1 torchrun --nproc-per-node 2 -m tests.lowering.triton.fused_on_simulated FOLDER SEED CALLS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.lowering.triton.gather import Gather, gather_and_multiply
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.scatter import Product, multiply_and_reduce, multiply_and_scatter
from fxpar.lowering.triton.tiling import Tiling
from fxpar.lowering.triton.workspace import Workspace
from tests.lowering.triton.simulated_gpu import simulated_gpu

SIZES = [(16, 16, 16), (20, 24, 16), (5, 33, 7), (48, 16, 32)]
"""Rows for each rank, columns and terms: of whole tiles, of tiles that are cut short, and of several for each rank."""


def run_fused_ops(folder: Path, seed: int, calls: int) -> list[str]:
    """What went wrong in so many calls of each op."""
    with simulated_gpu(folder, seed + dist.get_rank()) as gpu:
        done = [(call, *results) for call, results in enumerate(_calls(seed, calls))]
        gpu.synchronize()
    problems = []
    for call, found, expected in done:
        for name in found:
            if not torch.allclose(found[name], expected[name], atol=1e-4):
                problems.append(f"call {call}, {name}: {(found[name] - expected[name]).abs().max()}")
    return problems


def _calls(seed: int, calls: int) -> Any:
    assert dist.group.WORLD is not None
    rank, parts = dist.get_rank(), dist.get_world_size()
    workspace = Workspace(dist.group.WORLD.group_name, torch.device("cpu"))
    tiling = Tiling(16, 16, 16, warps=4, stages=2, band=1)
    for call in range(calls):
        rows, columns, terms = SIZES[(seed + call) % len(SIZES)]
        draw = torch.Generator().manual_seed(100 * seed + call)
        lefts = [torch.randn(rows * parts, terms, generator=draw) for _ in range(parts)]
        right = torch.randn(terms, columns, generator=draw)
        how = Fused(tiling, 1 + call % rows, pushes=call % 2 == 0)
        gather = Gather.of(lefts[0].chunk(parts)[rank], "rows", 1, parts)
        (product,), gathered = gather_and_multiply(gather, [right], [None], "rows", how, workspace)
        found = {"product": product, "gathered": gathered.clone()}
        found["scattered"] = multiply_and_scatter(
            Product.of(lefts[rank], right, None, "rows", 1, parts), how, workspace
        )
        found["reduced"] = multiply_and_reduce(Product.of_all(lefts[rank], right, None, parts), how, workspace)
        total = torch.stack(lefts).sum(0) @ right
        yield found, _expected(lefts[0], right, total, rank, parts)


def _expected(left: Tensor, right: Tensor, total: Tensor, rank: int, parts: int) -> dict[str, Tensor]:
    return {"product": left @ right, "gathered": left, "scattered": total.chunk(parts)[rank], "reduced": total}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, seed, calls = sys.argv[1:]
    sys.exit("\n".join(run_fused_ops(Path(folder), int(seed), int(calls))) or None)
