"""Steps and reshards end over process groups that are queues, as NCCL's are, with the numbers of one process."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.ir import fused_ops
from fxpar.world.launch import run_ranks
from tests.support.move_tensors import reshard_at_random
from tests.support.no_host_wait import HostWaitError, Unlooked
from tests.support.parity import Run, check_runs
from tests.support.queued_groups import HARDWARE_QUEUES, PATIENCE_S, HangError, on_queued_groups, use_queued_groups
from tests.transport.pass_in_groups import move_there_and_back

RUNS = {
    "chain of uneven stages": Run("chain", {"pipe": 2, "x": 2}, 4),
    "parameters of several stages": Run("shared embedder", {"pipe": 2, "data": 2}, 4),
    "tied embeddings": Run("gpt", {"pipe": 4}, 8, stages=4),
    "skip connections": Run("unet", {"pipe": 4}, 4, steps=1),
    "stages in turn": Run("gpt", {"pipe": 2}, 4, schedules=("interleaved",), stages=4, steps=1),
    "weights in shards": Run("gpt", {"pipe": 2, "z": 2}, 4),
    "one microbatch": Run("gpt", {"pipe": 2, "x": 2}, 1, steps=1),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_one_process(name: str) -> None:
    run_ranks(prod(RUNS[name].mesh.values()), on_queued_groups, check_runs, [RUNS[name]])


class Normalised(nn.Module):
    """A batch norm, whose buffers each microbatch changes, in each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.last = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.first(x).relu()).square().mean()
        return loss


def buffers_after_steps() -> dict[str, Tensor]:
    """The buffers of a model after two steps of three microbatches, and one without gradients."""
    torch.manual_seed(0)
    model, x = Normalised(), torch.randn(12, 6)
    fxpar.distribute(model, fxpar.init_mesh(pipe=2), stages=["last"], microbatches=3, example_inputs=(x,))
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    for _ in range(2):
        step(x).backward()
    with torch.no_grad():
        step(x)
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_a_rehearsal_changes_no_buffer() -> None:
    rehearsed, expected = run_ranks(2, on_queued_groups, buffers_after_steps), run_ranks(2, buffers_after_steps)
    for stage, found, wanted in zip(("first", "last"), rehearsed, expected, strict=True):
        assert found[f"{stage}.1.num_batches_tracked"] == 3
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def check_without_kernels(runs: Sequence[Run]) -> None:
    """As `check_runs`, where fused ops run as a collective and matmuls, one after another."""
    fused_ops.all_gather_matmul.register_kernel("cpu", fused_ops.all_gather_matmul_reference)
    fused_ops.matmul_reduce_scatter.register_kernel("cpu", fused_ops.matmul_reduce_scatter_reference)
    fused_ops.matmul_all_reduce.register_kernel("cpu", fused_ops.matmul_all_reduce_reference)
    check_runs(runs)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_what_does_not_run_as_one_op_is_left_to_overlap(has_kernels: bool, tmp_path: Path) -> None:
    run = Run("gpt", {"x": 2}, 2, schedules=("gpipe",), steps=1, fuse="always")
    check = check_runs if has_kernels else check_without_kernels
    run_ranks(2, on_queued_groups, check, [run], environment={"FXPAR_DUMP": str(tmp_path)})
    (table,) = tmp_path.glob("rank0/*fuse_collectives.txt")
    (backward,) = tmp_path.glob("rank0/*overlap_collectives_backward.*")
    assert ("ran one after the other" in table.read_text()) != has_kernels
    assert ("fxpar.matmul_" in backward.read_text()) == has_kernels


def test_every_strategy_reshards_between_any_meshes() -> None:
    run_ranks(8, on_queued_groups, reshard_at_random, 0, 20, 2)


@pytest.mark.parametrize("queues", ["1", "32"])
def test_ranks_that_send_to_each_other_end_however_few_queues_there_are(queues: str) -> None:
    found = run_ranks(6, on_queued_groups, move_there_and_back, environment={HARDWARE_QUEUES: queues})
    assert found == [[]] * 6


def connect_in_orders(*orders: tuple[int, int]) -> bool:
    """Whether ranks whose first collectives in two groups come in these orders find each other."""
    use_queued_groups()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    try:
        for number in orders[dist.get_rank()]:
            dist.broadcast(torch.zeros(1), 0, groups[number], async_op=True)
    except HangError:
        return False
    return True


def send_to_each_other_in(*group_of_sender: int) -> bool:
    """Whether two ranks end that each post a receive before they send, the sends of each in some group."""
    use_queued_groups()
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.broadcast(torch.zeros(1), 0, group)
    try:
        received = dist.broadcast(torch.zeros(1), 1 - rank, groups[group_of_sender[1 - rank]], async_op=True)
        dist.broadcast(torch.zeros(1), rank, groups[group_of_sender[rank]], async_op=True)
        assert received is not None
        received.wait()
    except HangError:
        return False
    return True


IMPATIENT = {PATIENCE_S: "2"}


def test_first_collectives_in_different_orders_hang() -> None:
    assert run_ranks(2, connect_in_orders, (0, 1), (0, 1)) == [True, True]
    assert run_ranks(2, connect_in_orders, (0, 1), (1, 0), environment=IMPATIENT) == [False, False]


@pytest.mark.parametrize(("groups", "queues", "ends"), [((0, 1), 2, True), ((0, 0), 2, False), ((0, 1), 1, False)])
def test_mutual_senders_hang_in_one_queue(groups: tuple[int, int], queues: int, ends: bool) -> None:
    environment = {HARDWARE_QUEUES: str(queues), **({} if ends else IMPATIENT)}
    assert run_ranks(2, send_to_each_other_in, *groups, environment=environment) == [ends, ends]


def test_a_look_at_a_value_amid_a_step_is_noticed() -> None:
    with Unlooked(), pytest.raises(HostWaitError, match="_local_scalar_dense"):
        torch.ones(()).item()
