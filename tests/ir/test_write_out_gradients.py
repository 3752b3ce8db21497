"""Gradients that a forward takes of its own values are ops of its graph; what cannot be written so is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import UnsupportedGraphError
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.support.captures import captured
from tests.support.one_process import ATEN, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)

grad = torch.autograd.grad
aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self, loss: Callable[[Net, Tensor], Tensor], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(4, 6), nn.Linear(6, 1), loss
        self.dropout = nn.Dropout(dropout)

    def score(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.first(x).tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)


def of_input(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return grad(net.score(x).sum(), x, create_graph=True)[0].square().mean()


def of_argument(net: Net, x: Tensor) -> Tensor:
    x.requires_grad = True
    return grad(net.score(x), x, torch.full((4, 1), 0.5), create_graph=True)[0].square().mean()


def that_counts_as_constant(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    score = net.score(x)
    (weights,) = grad(score.sum(), x, retain_graph=True)
    return (weights * score).square().mean()


def of_gradients(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = grad(net.score(x).sum(), x, create_graph=True)
    (second,) = grad(first.square().sum(), x, create_graph=True)
    return (second * x).square().mean()


def of_weights(net: Net, x: Tensor) -> Tensor:
    found = grad(net.score(x).sum(), [net.first.weight, net.last.weight], create_graph=True)
    return sum(each.square().mean() for each in found) + (net.first.weight * found[0]).mean()


def past_a_constant(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    hidden = net.first(x)
    scaled = net.last(hidden * hidden.detach().abs())
    return grad(scaled.sum(), x, create_graph=True)[0].square().mean()


def materialized(net: Net, x: Tensor) -> Tensor:
    x, other = x.clone().requires_grad_(), (2 * x).requires_grad_()
    found, none = grad(net.score(x).sum(), (x, other), create_graph=True, materialize_grads=True)
    return found.square().mean() + (none + 1).mean()


def by_func(net: Net, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: net.score(x).sum())(x).square().mean()


def forward_mode(net: Net, x: Tensor) -> Tensor:
    score, slope = torch.func.jvp(net.score, (x,), (torch.ones_like(x),))
    return score.mean() + slope.square().mean()


LOSSES = [
    by_func,
    of_input,
    of_argument,
    that_counts_as_constant,
    of_gradients,
    of_weights,
    past_a_constant,
    materialized,
]


def of_mean(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return grad(net.score(x).mean(), x, create_graph=True)[0].square().mean()


def of_what_is_not_used(net: Net, x: Tensor) -> Tensor:
    other = (2 * x).requires_grad_()
    return net.score(x).mean() + grad(net.score(x).sum(), other)[0].mean()


def by_autocast(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        return grad(net.score(x).sum(), x, create_graph=True)[0].square().mean()


def of_many(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return grad(net.score(x), x, torch.ones(2, 4, 1), create_graph=True, is_grads_batched=True)[0].mean()


def results(model: nn.Module, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The loss and all gradients."""
    loss = step(torch.linspace(-1, 1, 16).view(4, 4))
    loss.backward()
    grads = [torch.zeros(weight.shape) if weight.grad is None else weight.grad for weight in model.parameters()]
    return [loss.detach(), *(each.full_tensor() if isinstance(each, DTensor) else each for each in grads)]


def net_of(loss: Callable[[Net, Tensor], Tensor], dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(loss, dropout=dropout)


@pytest.mark.parametrize("loss", [*LOSSES, of_mean])
def test_losses_of_gradients_are_those_of_eager_mode(mesh: fxpar.Mesh, loss: Callable[[Net, Tensor], Tensor]) -> None:
    alone, model = net_of(loss), fxpar.distribute(net_of(loss), mesh, microbatches=1)
    found = results(model, torch.compile(model, backend="fxpar", options=ATEN))
    torch.testing.assert_close(found, results(alone, alone))


def test_tangents_that_are_zero_have_memory_where_code_is_generated(mesh: fxpar.Mesh) -> None:
    alone, model = net_of(forward_mode), fxpar.distribute(net_of(forward_mode), mesh, microbatches=1)
    torch.testing.assert_close(results(model, torch.compile(model, backend="fxpar")), results(alone, alone))


REFUSED = [
    (of_mean, 0.0, "no sum, such as a mean"),
    (of_input, 0.5, "random numbers were drawn"),
    (of_what_is_not_used, 0.0, "a gradient that there is not"),
    (by_autocast, 0.0, "by autocast"),
    (of_many, 0.0, "is_grads_batched"),
]


@pytest.mark.parametrize(("loss", "dropout", "problem"), REFUSED)
def test_what_would_be_another_gradient_is_refused(
    mesh: fxpar.Mesh, loss: Callable[[Net, Tensor], Tensor], dropout: float, problem: str
) -> None:
    model = fxpar.distribute(net_of(loss, dropout), mesh, microbatches=2)
    with pytest.raises(UnsupportedGraphError, match=f"test_write_out_gradients.py.*\n?.*{problem}"):
        torch.compile(model, backend="fxpar", options=ATEN)(torch.ones(4, 4))


def test_what_the_forward_has_computed_is_not_computed_anew() -> None:
    capture, _ = captured(net_of(of_input), (torch.ones(4, 4),))
    (stage,) = split_stages(capture, [])
    targets = [node.target for node in trace_joint(stage, with_backward=False).module.graph.nodes]
    assert targets.count(aten.tanh.default) == 1
    assert aten.tanh_backward.default in targets
