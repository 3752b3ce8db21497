"""A forward that sets `requires_grad` of a value trains as on one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import UnsupportedGraphError
from tests.support.one_process import ATEN, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


class Features(nn.Module):
    """As speech models of transformers do: a view of the input requires grad, so that a checkpoint would see it."""

    def __init__(self, *, of_input: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.of_input = of_input

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.of_input else x[:, None]
        hidden.requires_grad = True
        assert hidden.requires_grad
        hidden = checkpoint(self.first, hidden, use_reentrant=False).tanh()
        return self.second(hidden).square().mean()


def test_a_value_that_is_to_require_grad_changes_no_gradient(mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone = Features()
    model = copy.deepcopy(alone)
    x = torch.randn(4, 6)
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=[x])
    loss, expected = torch.compile(model, backend="fxpar", options=ATEN)(x), alone(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)


def test_an_input_that_is_to_require_grad_is_an_error(mesh: fxpar.Mesh) -> None:
    """Who passes it could look for its gradient."""
    with pytest.raises(UnsupportedGraphError, match="lets argument 0 require grad"):
        fxpar.distribute(Features(of_input=True), mesh, example_inputs=[torch.randn(4, 6)])
