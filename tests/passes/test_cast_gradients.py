"""cast_gradients: the gradients that leave are those that did, in the dtype of their sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpar._torch.compiler import FakeTensor
from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.node_meta import is_backward, tensor
from fxpar.ir.stage import Port, PortKind
from fxpar.passes.cast_gradients import cast_gradients
from tests.support.joint_graphs import joint_graph


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x @ self.up) @ self.down).square().mean()


def test_the_graph_returns_the_same_values_and_gradients_converted() -> None:
    model, x = Pair(), torch.randn(2, 4, requires_grad=True)
    joint = joint_graph(model, x)
    parameters = dict(model.named_parameters())
    arguments = [parameters.get(port.name, x).detach() for port in joint.inputs]
    before = joint.module(*arguments, torch.ones(()))
    cast_gradients(joint, {"up": torch.float64, "down": torch.float32})
    after = joint.module(*arguments, torch.ones(()))
    for port, one, other in zip((*joint.outputs, *joint.gradients), before, after, strict=True):
        assert torch.equal(one.to(other.dtype), other)
        assert other.dtype == (torch.float64 if port == Port(PortKind.PARAMETER, "up") else torch.float32)
    *_, cast = (node for node in joint.module.graph.nodes if node.target is torch.ops.aten._to_copy.default)
    assert is_backward(cast)
    value = tensor(cast)
    assert isinstance(value, FakeTensor)
    assert value.fake_mode is fake_mode_of(joint.module.graph)
