"""Modules that have a forward of their own, as wrappers of autocast give them, run it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import ReplacedForwardError
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.small import Small

mesh = pytest.fixture(mesh_of_one_process)

X = torch.linspace(-1, 1, 16).view(4, 4)


def wrapped(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: 2 * plain(x)


def _of_layers(self: Any, x: Tensor) -> Tensor:
    return 3 * self.layers(x).square().mean()


def method(module: nn.Module) -> None:
    module.forward = MethodType(_of_layers, module)


def autocast(module: nn.Module) -> None:
    module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)


def of_a_layer(module: nn.Module) -> None:
    wrapped(module.get_submodule("layers.0"))


def run(mesh: fxpar.Mesh, replace: Callable[[nn.Module], None], **options: Any) -> tuple[Tensor, Tensor, nn.Module]:
    """The loss of a distributed model, and of one that is not, with gradients."""
    alone, model = Small(), Small()
    for each in (alone, model):
        replace(each)
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=(X,), **options)
    found, expected = torch.compile(model, backend="fxpar", options=ATEN)(X), alone(X)
    found.backward()
    expected.backward()
    gradient, wanted = model.layers[0].weight.grad, alone.layers[0].weight.grad
    torch.testing.assert_close(gradient.full_tensor(), wanted, rtol=2e-2, atol=1e-3)  # type: ignore[union-attr]
    return found, expected, model


@pytest.mark.parametrize("replace", [wrapped, method, of_a_layer])
def test_a_forward_that_is_set_before_distribute_is_traced(
    mesh: fxpar.Mesh, replace: Callable[[nn.Module], None]
) -> None:
    found, expected, model = run(mesh, replace)
    torch.testing.assert_close(found, expected)
    assert list(inspect.signature(model.forward).parameters) == ["x"]


def test_it_may_compute_in_another_dtype(mesh: fxpar.Mesh) -> None:
    found, expected, _ = run(mesh, autocast)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


def test_modules_of_which_outputs_are_hinted_run_theirs(mesh: fxpar.Mesh) -> None:
    found, expected, _ = run(mesh, of_a_layer, layouts={"layers.0:out": (None, None)})
    torch.testing.assert_close(found, expected)


def test_copies_run_it_too(mesh: fxpar.Mesh) -> None:
    found, _, model = run(mesh, method)
    torch.testing.assert_close(torch.compile(copy.deepcopy(model), backend="fxpar", options=ATEN)(X), found)


def test_one_that_is_set_later_has_to_call_the_one_before(mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Small(), mesh, example_inputs=(X,))
    method(model)
    with pytest.raises(ReplacedForwardError, match=r"set `model.forward` before fxpar.distribute"):
        torch.compile(model, backend="fxpar", options=ATEN)(X)
