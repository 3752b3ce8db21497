"""Which of a forward's results is the loss, and that all others have values but no gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpar
from fxpar.errors import NotTheLossError
from tests.support.one_process import ATEN, batch, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


class Losses(nn.Module):
    """Returns a scalar besides its loss, as `form` says, and also something that does not require grad."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(6, 3), form

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        aux, loss = y.abs().mean(), y.square().mean()
        match self.form:
            case "named":
                return {"aux": aux, "loss": loss, "best": y.argmax(-1), "y": y.detach()}
            case "named tuple":
                return Named(aux, loss)
            case "dataclass":
                return Output(aux, loss)
            case "dataclass within":
                return {"outputs": [Output(aux, Known(aux, loss))]}
            case "registered dataclass":
                return Known(aux, loss)
            case "inside":
                return aux, {"loss": loss}
            case "twice":
                return aux, loss, {"loss": loss}
            case "no scalar":
                return {"loss": y.square().mean(-1), "mean": loss, "aux": aux}
        return loss, aux


class Named(NamedTuple):
    aux: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Output:
    aux: Tensor
    loss: Any


@dataclass
class Known:
    aux: Tensor
    loss: Tensor


pytree.register_dataclass(Known)

LOSSES: dict[str, Callable[[Any], list[Any]]] = {
    "named": lambda found: [found["loss"]],
    "named tuple": lambda found: [found.loss],
    "dataclass": lambda found: [found.loss],
    "registered dataclass": lambda found: [found.loss],
    "dataclass within": lambda found: [found["outputs"][0].loss.loss],
    "inside": lambda found: [found[1]["loss"]],
    "twice": lambda found: [found[1], found[2]["loss"]],
    "no scalar": lambda found: [found["mean"]],
    "first": lambda found: [found[0]],
}


@pytest.mark.parametrize("form", LOSSES)
def test_the_loss_is_the_scalar_called_so_or_else_the_first(mesh: fxpar.Mesh, form: str) -> None:
    model = Losses(form)
    x, alone = batch(4)[0], copy.deepcopy(model)
    fxpar.distribute(model, mesh)
    for loss in LOSSES[form](torch.compile(model, backend="fxpar", options=ATEN)(x)):
        assert type(loss) is Tensor, "the loss is no DTensor"
        torch.testing.assert_close(loss, alone.linear(x).square().mean())
    loss.backward()
    alone.linear(x).square().mean().backward()
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), alone.linear.weight.grad)


def test_results_besides_the_loss_have_values_but_no_gradient(mesh: fxpar.Mesh) -> None:
    step = torch.compile(fxpar.distribute(Losses("named"), mesh), backend="fxpar", options=ATEN)
    found = step(batch(4)[0])
    assert found["aux"].requires_grad
    assert not found["best"].requires_grad
    assert not found["y"].requires_grad
    assert found["aux"].item() > 0
    for of_aux in (lambda: found["aux"].backward(), lambda: (found["loss"] + 10 * found["aux"]).backward()):
        with pytest.raises(NotTheLossError, match=r"result 0 of the forward.*which is result 1.*return the sum"):
            of_aux()
    (found["loss"] + 10 * found["aux"].detach().full_tensor()).backward()
    with torch.no_grad():
        assert not step(batch(4)[0])["aux"].requires_grad
