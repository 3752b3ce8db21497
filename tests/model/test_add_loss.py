"""Models that return predictions, and are given the loss that a training script computes."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss

import fxpar
from fxpar.errors import AlreadyDistributedError, AmbiguousTargetError, TrainedLossError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import compare_copy

mesh = pytest.fixture(mesh_of_one_process)

CLASSES = 12


class Classifier(nn.Module):
    """Returns a prediction for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        predicted: Tensor = self.last(self.first(x).relu())
        return predicted


class WeightedLoss(nn.Module):
    """Weighs each class by a buffer that is the loss's own, no part of the model."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        chosen = log_softmax(output, -1).gather(1, target[:, None])[:, 0]
        return -(chosen * self.weights[target]).mean()


def loss_of_several(output: Tensor, target: Mapping[str, Any]) -> Tensor:
    return cross_entropy(output, target["classes"]) + target["weight"] * mse_loss(output, target["values"])


def loss_and_output(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"loss": cross_entropy(output, target), "output": output}


def check_losses(sizes: Mapping[str, int]) -> None:
    """Steps with each loss. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    x, classes = torch.randn(8, 10), torch.randint(CLASSES, (8,))
    several = {"classes": classes, "values": torch.randn(8, CLASSES), "weight": 0.5}
    losses = {
        cross_entropy: classes,
        nn.CrossEntropyLoss(label_smoothing=0.1): classes,
        WeightedLoss(): classes,
        loss_of_several: several,
    }
    for loss, target in losses.items():
        alone = fxpar.add_loss(Classifier(), loss)
        compare_copy(f"{loss} on {sizes}", alone, {"x": x, "target": target}, mesh, opener="last", steps=2)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_losses_equal_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_losses, sizes)


def test_without_a_target_the_model_returns_its_output(mesh: fxpar.Mesh) -> None:
    alone = fxpar.add_loss(Classifier(), loss_and_output)
    model = fxpar.distribute(copy.deepcopy(alone), mesh)
    step, x, target = (
        torch.compile(model, backend="fxpar", options=ATEN),
        torch.randn(4, 10),
        torch.randint(CLASSES, (4,)),
    )
    found, expected = step(x, target=target), alone(x, target=target)
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(found["output"].full_tensor().detach(), expected["output"].detach())
    with torch.no_grad():
        torch.testing.assert_close(step(x), alone(x))


def test_the_model_keeps_its_type_and_the_names_of_its_parameters() -> None:
    model, plain = fxpar.add_loss(Classifier(), WeightedLoss()), Classifier()
    assert isinstance(model, Classifier)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert str(inspect.signature(model.forward)).startswith("(x: 'Tensor', *, target=None)")


class TakesTarget(Classifier):
    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        return super().forward(x) if target is None else mse_loss(super().forward(x), target)


def test_a_forward_with_a_target_of_its_own_is_an_error() -> None:
    with pytest.raises(AmbiguousTargetError, match=r"TakesTarget the argument 'target', .* found forward\(self, x"):
        fxpar.add_loss(TakesTarget(), cross_entropy)
    with pytest.raises(AmbiguousTargetError, match="Classifier"):
        fxpar.add_loss(fxpar.add_loss(Classifier(), cross_entropy), mse_loss)


def test_a_loss_with_parameters_is_an_error() -> None:
    with pytest.raises(TrainedLossError, match=r"Bilinear has weight, bias, .* make it a submodule"):
        fxpar.add_loss(Classifier(), nn.Bilinear(CLASSES, CLASSES, 1))


def test_the_loss_is_added_before_the_model_is_distributed(mesh: fxpar.Mesh) -> None:
    with pytest.raises(AlreadyDistributedError, match="Classifier"):
        fxpar.add_loss(fxpar.distribute(Classifier(), mesh), cross_entropy)
