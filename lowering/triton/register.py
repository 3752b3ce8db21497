"""The fused ops of `fxpar.ir.fused_ops` on CUDA devices; importing this registers them. It needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

from fxpar._torch.distributed import process_group_named
from fxpar.ir import fused_ops, random
from fxpar.ir.tiles import LogicalBox
from fxpar.lowering.triton.decide import decide, possible_tilings, versions
from fxpar.lowering.triton.factors import as_matrices, come_in_vectors, dense, is_transposed
from fxpar.lowering.triton.gather import FORMS, Gather, gather_and_multiply
from fxpar.lowering.triton.launch import uniform_call, uniform_programs
from fxpar.lowering.triton.pipelined import (
    gather_pipelined,
    has_pipelined_gather,
    has_pipelined_scatter,
    scatter_pipelined,
)
from fxpar.lowering.triton.plan import Fused, How, Pipelined, Unfused
from fxpar.lowering.triton.scatter import Product, multiply_and_reduce, multiply_and_scatter
from fxpar.lowering.triton.tiling import DTYPES, Op, Tiling
from fxpar.lowering.triton.tuner import TuningProblem, gather_variants
from fxpar.lowering.triton.workspace import Workspace
from fxpar.world.hosts import discover_hosts

_decided: dict[tuple[str, TuningProblem], How] = {}
"""By group: the ranks of a group may have decided differently on the same problem in other groups."""

_chosen: dict[Hashable, How] = {}
"""What was decided for calls with such arguments; the problem that they are is not worked out again."""


@fused_ops.all_gather_matmul.register_kernel("cuda")
def all_gather_matmul(
    shard: Tensor,
    others: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    form: str,
    outer: int,
    parts: int,
    keeps_gathered: bool,
    group_name: str,
) -> list[Tensor]:
    """See `fxpar.ir.fused_ops`."""

    def unfused() -> list[Tensor]:
        return fused_ops.all_gather_matmul_reference(
            shard, others, biases, form, outer, parts, keeps_gathered, group_name
        )

    workspace = _workspace_for([shard, *others], parts, group_name) if form in FORMS else None
    if workspace is None:
        return unfused()
    gather = Gather.of(shard, form, outer, parts)

    def run(how: How) -> list[Tensor]:
        if isinstance(how, Unfused):
            return unfused()
        if isinstance(how, Pipelined):
            return gather_pipelined(shard, others, biases, keeps_gathered, group_name)
        products, gathered = gather_and_multiply(gather, others, biases, form, how, workspace)
        kept = [gathered.clone() if how.pushes else gathered] if keeps_gathered else []
        return products + kept

    def choose() -> How:
        left = as_matrices(torch.empty(gather.shape, dtype=shard.dtype, device="meta"))
        rights = [as_matrices(other.mT if form == "columns" else other) for other in others]
        pipelined = has_pipelined_gather(form, outer, shard)
        problem = _problem(f"gather {form}", left, rights, outer, workspace, has_pipelined=pipelined)
        possible = _tilings("gather", left, rights, shard.device)
        ways = gather_variants(possible[0], gather.pieces.rows)
        return _decide(problem, possible, ways, run, workspace)

    return run(_choice((f"gather {form}", outer), [shard, *others], workspace, choose))


@fused_ops.matmul_reduce_scatter.register_kernel("cuda")
def matmul_reduce_scatter(
    left: Tensor, right: Tensor, bias: Tensor | None, form: str, outer: int, parts: int, group_name: str
) -> Tensor:
    """See `fxpar.ir.fused_ops`."""

    def unfused() -> Tensor:
        return fused_ops.matmul_reduce_scatter_reference(left, right, bias, form, outer, parts, group_name)

    has_kernel = form != "columns" or left.dim() == 2
    workspace = _workspace_for([left, right], parts, group_name) if has_kernel else None
    if workspace is None:
        return unfused()
    product = Product.of(left, right, bias, form, outer, parts)

    def run(how: How) -> Tensor:
        if isinstance(how, Unfused):
            return unfused()
        if isinstance(how, Pipelined):
            return scatter_pipelined(left, right, group_name)
        return multiply_and_scatter(product, how, workspace)

    def choose() -> How:
        pipelined = has_pipelined_scatter(form, outer, left, bias)
        problem = _problem(f"scatter {form}", product.left, [product.right], outer, workspace, has_pipelined=pipelined)
        possible = _tilings("scatter", product.left, [product.right], left.device)
        return _decide(problem, possible, [Fused(possible[0])], run, workspace)

    return run(_choice((f"scatter {form}", outer, bias is None), [left, right], workspace, choose))


@fused_ops.matmul_all_reduce.register_kernel("cuda")
def matmul_all_reduce(left: Tensor, right: Tensor, bias: Tensor | None, parts: int, group_name: str) -> Tensor:
    """See `fxpar.ir.fused_ops`."""

    def unfused() -> Tensor:
        return fused_ops.matmul_all_reduce_reference(left, right, bias, parts, group_name)

    workspace = _workspace_for([left, right], parts, group_name)
    if workspace is None:
        return unfused()
    product = Product.of_all(left, right, bias, parts)

    def run(how: How) -> Tensor:
        if not isinstance(how, Fused):
            return unfused()
        return multiply_and_reduce(product, how, workspace).view(*left.shape[:-1], right.shape[-1])

    def choose() -> How:
        problem = _problem("all-reduce", product.left, [product.right], 1, workspace)
        possible = _tilings("scatter", product.left, [product.right], left.device)
        return _decide(problem, possible, [Fused(possible[0])], run, workspace)

    return run(_choice("all-reduce", [left, right], workspace, choose))


@random.uniform.register_kernel("cuda")
def uniform(stream: Tensor, shape: list[int], sizes: list[int], strides: list[int], offset: int, span: int) -> Tensor:
    """See `fxpar.ir.random`."""
    out = torch.empty(shape, dtype=torch.float32, device=stream.device)
    if out.numel() > 0:
        box = LogicalBox(tuple(sizes), tuple(strides), offset)
        uniform_call(out, stream, box, span).run(uniform_programs(out))
    return out


def _workspace_for(factors: Sequence[Tensor], parts: int, group_name: str) -> Workspace | None:
    """The group's symmetric memory; None if it has none, or if no kernel multiplies such factors.

    The first call is a collective.
    """
    like = factors[0]
    are_alike = all(f.dtype == like.dtype and f.dim() == like.dim() and f.numel() > 0 for f in factors)
    if parts == 1 or like.dtype not in DTYPES or not are_alike:
        return None
    return _workspace(group_name, like.device)


@cache
def _workspace(group_name: str, device: torch.device) -> Workspace | None:
    """The group's symmetric memory, if its GPUs can share any. The first call is a collective."""
    if len(set(discover_hosts(process_group_named(group_name)))) > 1:
        return None
    try:
        return Workspace(group_name, device)
    except RuntimeError:  # raised by PyTorch if GPUs cannot access each other's memory
        return None


def _tilings(op: Op, left: Tensor, rights: Sequence[Tensor], device: torch.device) -> list[Tiling]:
    """The tilings that can load these factors, and that fit into the device's shared memory."""
    vectors = all(come_in_vectors(left, dense(right)) for right in rights)
    return possible_tilings(op, left.dtype, device, vectors=vectors, matrices=left.shape[0])


def _problem(
    op: str,
    left: Tensor,
    rights: Sequence[Tensor],
    outer: int,
    workspace: Workspace,
    *,
    has_pipelined: bool = False,
) -> TuningProblem:
    columns = sum(right.shape[-1] for right in rights)
    return TuningProblem(
        op,
        (left.shape[0], left.shape[1], columns, left.shape[2]),
        "".join("t" if is_transposed(factor) else "r" for factor in (left, *rights)),
        str(left.dtype),
        outer,
        workspace.parts,
        torch.cuda.get_device_name(workspace.device),
        workspace.link(),
        versions(),
        has_pipelined,
    )


def _choice(op: Hashable, factors: Sequence[Tensor], workspace: Workspace, choose: Callable[[], How]) -> How:
    """What `choose` returns: called once for factors of these shapes, strides, dtypes and alignments."""
    kinds = tuple((each.shape, each.stride(), each.dtype, each.data_ptr() % 16) for each in factors)
    key = op, workspace.group.group_name, workspace.device, kinds
    if key not in _chosen:
        _chosen[key] = choose()
    return _chosen[key]


def _decide(
    problem: TuningProblem,
    possible: Sequence[Tiling],
    ways: Sequence[Fused],
    run: Callable[[How], object],
    to: Workspace,
) -> How:
    key = to.group.group_name, problem
    if key not in _decided:
        _decided[key] = decide(problem, possible, ways, run, to.renew, to.group, to.device)
    return _decided[key]
