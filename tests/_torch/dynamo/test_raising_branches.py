"""Forwards that raise for values of their tensors are traced, and raise for the same values."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpar
from fxpar.errors import ForwardRaisesError, GraphBreakError
from tests.support.one_process import ATEN, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


class Careful(nn.Module):
    """A layer behind a check of its argument."""

    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.check = nn.Linear(3, 3), check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.linear(x).square().mean()


def large(x: Tensor) -> None:
    if x is not None and x.max() >= 10:
        raise ValueError(f"values must be below {10}, but the largest is {x.max()}")


def not_finite(x: Tensor) -> None:
    if not torch.isfinite(x).all():
        raise FloatingPointError


def out_of_range(x: Tensor) -> None:
    if (x < -10).any() or (x > 10).any():
        message = "out of range"
        raise ValueError(message)


def with_another_branch(x: Tensor) -> Tensor:
    if x.abs().sum() == 0:
        raise ZeroDivisionError("all are zero")
    else:
        y = x / x.abs().sum()
    return y


BAD = {large: 11.0, not_finite: float("nan"), out_of_range: -11.0, with_another_branch: 0.0}


class WithVariances(nn.Module):
    """PyTorch's loss of means and variances checks that the latter are no negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)

    def forward(self, x: Tensor, y: Tensor, least: Tensor) -> Tensor:
        mean, log_variance = self.linear(x).chunk(2, -1)
        return F.gaussian_nll_loss(mean, y, log_variance.exp() + least)


def test_a_loss_of_pytorch_that_raises_trains(mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone, (x, y) = WithVariances(), torch.randn(2, 4, 3)
    model = copy.deepcopy(alone)
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=(x, y, torch.zeros(())))
    step = torch.compile(model, backend="fxpar", options=ATEN)
    expected, found = alone(x, y, torch.zeros(())), step(x, y, torch.zeros(()))
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), alone.linear.weight.grad)
    with pytest.raises(RuntimeError, match="the forward raises at"):
        step(x, y, torch.tensor(-100.0))


@pytest.mark.parametrize("check", BAD)
def test_a_branch_that_only_raises_is_an_assertion(check: Callable[[Tensor], object], mesh: fxpar.Mesh) -> None:
    step = torch.compile(fxpar.distribute(Careful(check), mesh), backend="fxpar", options=ATEN)
    step(torch.ones(2, 3)).backward()
    bad = torch.full((2, 3), BAD[check])
    with pytest.raises((ValueError, ArithmeticError)):
        check(bad)
    first = inspect.getsourcelines(check)[1]
    lines = "|".join(str(first + number) for number in range(5))
    with pytest.raises(RuntimeError, match=rf"the forward raises at .*test_raising_branches.py:({lines})"):
        step(bad)
    step(2 * torch.ones(2, 3)).backward()


def catches(x: Tensor) -> None:
    try:
        if x.sum() > 100:
            raise ValueError
    except ValueError:
        x.add_(1)


def test_a_branch_that_catches_what_it_raises_stays_an_error(mesh: fxpar.Mesh) -> None:
    step = torch.compile(fxpar.distribute(Careful(catches), mesh), backend="fxpar", options=ATEN)
    with pytest.raises(GraphBreakError, match="Data-dependent branching"):
        step(torch.ones(2, 3))


class Switched(nn.Module):
    """Decides by an argument that is a number, twice, and by one that may be a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: object, flag: object) -> Tensor:
        h = self.linear(x)
        for _ in range(2):
            if scale:
                h = h * 2
        if not flag:
            raise ValueError("no flag")
        return h.square().mean()


def test_other_conditions_are_decided_in_the_trace(mesh: fxpar.Mesh) -> None:
    step = torch.compile(fxpar.distribute(Switched(), mesh), backend="fxpar", options=ATEN)
    x = torch.ones(2, 3)
    torch.testing.assert_close(step(x, 1, True), 16 * step(x, 0, torch.tensor(True)))
    with pytest.raises(RuntimeError, match="the forward raises at"):
        step(x, 0, torch.tensor(False))
    with pytest.raises(ForwardRaisesError, match="no flag"):
        step(x, 0, False)
