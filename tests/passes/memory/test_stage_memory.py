"""What a stage takes where weights are stored in shards: what is gathered, and what is not reduced yet, beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.passes.hoist_storage import hoist_storage
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.memory.activation_memory import activation_memory
from fxpar.passes.memory.stage_memory import stage_memory
from fxpar.passes.partition import partition
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.placements import as_told
from tests.support.stored_graphs import lay_out_stored


class Mlp(nn.Module):
    """A weight that training changes, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8))
        self.down = nn.Parameter(torch.randn(8, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.up) @ self.down).sum()


WHOLE = {"up": 4 * 8 * 4, "down": 8 * 6 * 4}


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("reductions", [False, True])
def test_weights_and_gradients_are_counted_as_they_are_held(gathers: bool, reductions: bool) -> None:
    joint = joint_graph(Mlp(), torch.randn(2, 4))
    with fake_mesh(z=2) as mesh:
        lay_out_stored(joint, mesh, as_told({}))
        local = insert_collectives(joint, mesh)
    hoisted = hoist_storage(local, gathers=gathers, reductions=reductions)
    kept = activation_memory(hoisted.body, partition(hoisted.body))
    memory = stage_memory(local, hoisted, kept, dict.fromkeys(WHOLE, torch.float32), {"B": 7})
    assert memory.parameters == sum(WHOLE.values()) * (1.5 if gathers else 0.5)
    assert memory.gradients == WHOLE["up"] * (1.5 if reductions else 0.5)
    assert memory.terms == WHOLE["up"] * (1 if reductions else 0.5)
    assert memory.working == {"B": 7}
    assert memory.optimizer == 2 * WHOLE["up"] / 2
    # The backward takes `down` alone: gathered for the step, or by the forward of the microbatch.
    assert memory.saved_for_inputs + memory.saved_for_weights == (0 if gathers else WHOLE["down"])
