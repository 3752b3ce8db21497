"""What ranks do to prove the fused ops of CPUs; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fxpar.errors import PeerLostError
from fxpar.ir import fused_ops
from fxpar.lowering.cpu.gathering import Gathering
from fxpar.lowering.cpu.terms import Terms
from fxpar.lowering.cpu.workspace import workspace_of
from tests.lowering.cpu.fused_cases import Case, all_cases, arguments

OPS: dict[str, Callable[..., Any]] = {
    "gather": torch.ops.fxpar.all_gather_matmul,
    "scatter": torch.ops.fxpar.matmul_reduce_scatter,
    "reduce": torch.ops.fxpar.matmul_all_reduce,
}
REFERENCES: dict[str, Callable[..., Any]] = {
    "gather": fused_ops.all_gather_matmul_reference,
    "scatter": fused_ops.matmul_reduce_scatter_reference,
    "reduce": fused_ops.matmul_all_reduce_reference,
}


def live_on(hosts: Sequence[str]) -> None:
    """Say which host this rank is on; others are reached by messages alone."""
    os.environ["FXPAR_HOST"] = hosts[dist.get_rank()]


def compare_all(hosts: Sequence[str], every: int = 1) -> list[str]:
    """What is wrong with any case's result, by a bound on its rounding errors; of all cases, or every so many."""
    live_on(hosts)
    cases = list(all_cases())[::every]
    return [found for case in cases if (found := compare(case, dist.group.WORLD)) is not None]


def compare(case: Case, group: dist.ProcessGroup) -> str | None:
    """What is wrong with the result of a case on the ranks of a group."""
    given = arguments(case, dist.get_rank(group), group.size())
    results = _as_list(OPS[case.op](*given, group.group_name))
    exact = tree_map_only(Tensor, Tensor.double, given)
    expected = _as_list(REFERENCES[case.op](*exact, group.group_name))
    for number, (result, right) in enumerate(zip(results, expected, strict=True)):
        if result.shape != right.shape or result.dtype != case.dtype or not result.is_contiguous():
            return f"{case}: result {number} is {result.dtype} {tuple(result.shape)}, strides {result.stride()}"
        magnitude = right.abs().max().item() if right.numel() else 0.0
        wrong = (result.double() - right).abs() > 4 * torch.finfo(case.dtype).eps * magnitude
        if wrong.any():
            return f"{case}: result {number} is wrong in {int(wrong.sum())} of {wrong.numel()} elements"
    return None


def _as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else results


def compare_in_groups() -> list[str]:
    """Groups that share ranks, at the same time, and groups of one rank."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    mine = [group for group in [*pairs, *alone, dist.group.WORLD] if dist.get_rank(group) >= 0]
    cases = [case for case in all_cases() if case.outer > 1]
    return [found for case in cases for group in mine if (found := compare(case, group)) is not None]


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Every rank lingers at random before it hands anything to others."""
    chance = random.Random(1000 * seed + dist.get_rank())

    def lingering(method: Callable[..., None]) -> Callable[..., None]:
        def linger(*args: Any, **keywords: Any) -> None:
            time.sleep(chance.choice((0.0, 0.0, 0.002, 0.01)))
            method(*args, **keywords)

        return linger

    with (
        patch.object(Gathering, "publish", lingering(Gathering.publish)),
        patch.object(Terms, "compute", lingering(Terms.compute)),
    ):
        yield


LARGE = (
    Case("gather", "rows", rows=300, num_others=2),
    Case("gather", "sum_left", rows=300, outer=2),
    Case("scatter", "rows", rows=3000),
    Case("scatter", "columns", rows=300, dtype=torch.bfloat16),
    Case("reduce", "rows", rows=2001),
)
"""Cases of several chunks."""


def run_delayed(hosts: Sequence[str], rounds: int) -> list[str]:
    """The cases whose bits changed when ranks lingered, or when memory held rubbish."""
    live_on(hosts)
    first = {case: run(case) for case in LARGE}
    changed = []
    for seed in range(rounds):
        with delays(seed):
            for case in LARGE:
                if not _are_equal(run(case), first[case]):
                    changed.append(f"{case} with delays {seed}")
    for case in LARGE:
        poison()
        if not _are_equal(run(case), first[case]):
            changed.append(f"{case} after poison")
    return changed


def run(case: Case) -> list[Tensor]:
    """The results of a case on all ranks."""
    given = arguments(case, dist.get_rank(), dist.get_world_size())
    return _as_list(OPS[case.op](*given, dist.group.WORLD.group_name))


def _are_equal(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


def poison() -> None:
    """Let all buffers of all ranks hold NaN, between calls."""
    dist.barrier()
    workspace = workspace_of(dist.group.WORLD.group_name)
    for buffers in workspace.buffers:
        buffers[workspace.rank].fill_(0xFF)
    dist.barrier()
    assert all(buffer.view(torch.float32).isnan().all() for buffers in workspace.buffers for buffer in buffers.values())
    dist.barrier()


def run_with_everything_there() -> list[str]:
    """The gather-matmuls whose bits are others when every rank has published all before any multiplies."""
    changed = []
    wait = Gathering.wait

    def wait_for_all(gathering: Gathering, part: int, chunk: int) -> Tensor:
        dist.barrier()
        return wait(gathering, part, chunk)

    for case in [case for case in all_cases() if case.op == "gather" and case.rows > 0]:
        first = run(case)
        with patch.object(Gathering, "wait", wait_for_all):
            if not _are_equal(run(case), first):
                changed.append(str(case))
    return changed


def run_back_to_back(hosts: Sequence[str], num_calls: int) -> list[int]:
    """The calls with wrong results, of many with whole numbers, one after another, that vary in size.

    Ranks linger at random between what they do, so that each is now early, now late.
    """
    live_on(hosts)
    with delays(seed=num_calls):
        return _wrong_calls(num_calls)


def _wrong_calls(num_calls: int) -> list[int]:
    rank, parts, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    wrong = []
    for call in range(num_calls):
        rows = 1 + 37 * call % 101
        lefts = [_whole_numbers(call, 1, other, parts * rows, 7) for other in range(parts)]
        rights = [_whole_numbers(call, 2, other, 7, 9) for other in range(parts)]
        total = torch.stack([left @ right for left, right in zip(lefts, rights, strict=True)]).sum(0)
        if call % 3 == 0:
            shards = [left[:rows] for left in lefts]
            (found,) = OPS["gather"](shards[rank], [rights[rank]], [None], "rows", 1, parts, False, name)
            expected = torch.cat(shards) @ rights[rank]
        elif call % 3 == 1:
            found = OPS["scatter"](lefts[rank], rights[rank], None, "rows", 1, parts, name)
            expected = total[rank * rows : (rank + 1) * rows]
        else:
            found = OPS["reduce"](lefts[rank], rights[rank], None, parts, name)
            expected = total
        if not torch.equal(found, expected):
            wrong.append(call)
    return wrong


def _whole_numbers(call: int, kind: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * call + 100 * kind + rank)
    return torch.randint(-8, 9, shape, generator=generator).float()


def sums_in_order_of_ring() -> list[str]:
    """The dtypes in which a sum differs in any bit from its terms, added up as floats around the ring."""
    rank, parts, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        case = Case("scatter", "rows", rows=33, dtype=dtype)
        given = [arguments(case, other, parts) for other in range(parts)]
        found = OPS["scatter"](*given[rank], name)
        mine = slice(33 * rank, 33 * (rank + 1))
        total = torch.zeros(found.shape, dtype=torch.promote_types(dtype, torch.float32))
        for step in range(1, parts + 1):
            left, right, *_ = given[rank - step]
            if total.dtype == dtype:
                total.addmm_(left[mine], right)
            else:
                total += left[mine] @ right
        if not torch.equal(found, total.to(dtype)):
            wrong.append(str(dtype))
    return wrong


def lose_a_rank(hosts: Sequence[str], ops: Sequence[str], doomed: int) -> list[str]:
    """The errors of calls after a rank was killed, which had taken part in the same calls before."""
    live_on(hosts)
    cases = [Case(op, "rows") for op in ops]
    for case in cases:
        run(case)
    if dist.get_rank() == doomed:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for case in cases:
        try:
            run(case)
            errors.append("it went on")
        except PeerLostError as error:
            errors.append(str(error))
    return errors
