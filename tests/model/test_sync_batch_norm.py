"""SyncBatchNorm over the batch shards of a mesh is BatchNorm on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.compiler import localize, plan_stages
from fxpar.distribute_model import distribute
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import distribution_of
from fxpar.passes.insert_collectives import communicating
from fxpar.world.launch import run_ranks
from tests.model.train_sync_batch_norm import compare_with_one_process
from tests.support.fake_mesh import fake_mesh


def test_loss_gradients_and_running_statistics_equal_those_of_one_process() -> None:
    run_ranks(4, compare_with_one_process, {"data": 2, "z": 2})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.SyncBatchNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).square().mean()


@pytest.mark.parametrize(("sizes", "axes"), [({"data": 2, "z": 2}, ["data", "z"]), ({"x": 1}, [])])
def test_statistics_are_reduced_over_the_batch_axes_forward_and_backward(
    sizes: dict[str, int], axes: list[str]
) -> None:
    torch.compiler.reset()
    with fake_mesh(**sizes) as mesh:
        model = distribute(Net(), mesh)
        capture = capture_forward(model, "cpu", (torch.zeros(3, 4),))
        (stage,) = plan_stages(capture, distribution_of(capture.model), ())
        started = communicating(localize(stage.joint, mesh).module.graph)
        # Mean and variance, and the gradient of each.
        assert [line for line in started if "reduce" in line and "scatter" not in line] == [
            f"all_reduce over {axis}" for _ in range(4) for axis in axes
        ]


def test_a_process_group_of_its_own_is_an_error() -> None:
    with fake_mesh(data=2) as mesh:
        model = Net()
        model.norm.process_group = torch.distributed.group.WORLD
        with pytest.raises(UnsupportedGraphError, match="SyncBatchNorm 'norm' has a process group of its own"):
            distribute(model, mesh)
