"""Forwards that read their parameters in other ways than by name, on meshes as on one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.parity import compare, compare_copy


class Reader(nn.Module):
    """Adds to its loss what `read` makes of its parameters; the weight of the first layer is also that of the last."""

    def __init__(self, read: Callable[[Reader], Tensor | float]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.Linear(8, 16)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.read = read

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.second(self.first(x).relu()).relu()
        return (self.last(h) - target).square().mean() + self.read(self)


def weight_penalty(model: Reader) -> Tensor:
    """A tied weight counts once."""
    return 0.1 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def trained_weight_penalty(model: Reader) -> Tensor:
    return sum((p.square().sum() for p in model.parameters() if p.requires_grad), start=torch.zeros(()))


def penalty_by_name(model: Reader) -> Tensor:
    return torch.stack([p.norm() for name, p in model.named_parameters() if "weight" in name]).sum()


def held_in_a_dictionary(model: Reader) -> Tensor:
    assert model.second._parameters["weight"] is not None
    return model.second._parameters["weight"].square().mean()


def by_path(model: Reader) -> Tensor:
    return model.get_parameter("second.weight").square().mean()


def size_type_and_count(model: Reader) -> Tensor:
    scale = next(model.second.parameters()).shape[1] + sum(p.numel() for p in model.parameters())
    return torch.ones((), dtype=next(model.last.parameters()).dtype) * scale * 1e-3


def with_others_in_place(model: Reader) -> Tensor:
    """The layer computes with twice its weight, and behind that with its own again."""
    doubled = {name: 2 * parameter for name, parameter in model.second.named_parameters()}
    x = torch.linspace(-1, 1, 16)
    other: Tensor = functional_call(model.second, doubled, (x,))
    return (other * model.second(x)).mean()


def within_a_transform(model: Reader) -> Tensor:
    """A penalty on the gradients of a layer, for each of several inputs."""
    slopes = vmap(grad(lambda x: model.second(x).tanh().sum()))(torch.linspace(-1, 1, 48).view(3, 16))
    return 0.1 * slopes.square().mean()


READS = {
    each.__name__: each
    for each in (
        weight_penalty,
        trained_weight_penalty,
        penalty_by_name,
        held_in_a_dictionary,
        by_path,
        size_type_and_count,
        with_others_in_place,
        within_a_transform,
    )
}


def check_reads(sizes: Mapping[str, int]) -> None:
    """Two steps of each. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for name, read in READS.items():
        torch.manual_seed(0)
        alone, whole = Reader(read), {"x": torch.randn(8, 8), "target": torch.randn(8, 16)}
        hints = {"first.weight": ("x", None), "second.weight": (None, "x")} if "x" in sizes else None
        compare_copy(f"{name} on {sizes}", alone, whole, mesh, opener="second", layouts=hints, steps=2)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"pipe": 2}, {"z": 2}], ids=str)
def test_a_forward_that_reads_its_parameters_in_another_way_equals_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_reads, sizes)


class OfTheirDtypes(nn.Module):
    """Converts what each part is given to the dtype of its first parameter, and decays all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.to(next(self.first.parameters()).dtype))
        decay = sum(parameter.square().sum() for parameter in self.parameters())
        loss: Tensor = self.last(h.to(next(self.last.parameters()).dtype)).square().mean() + 0.01 * decay
        return loss


def check_later_traces(sizes: Mapping[str, int]) -> None:
    """Batches of three sizes, two of which are traced when parameters of other stages are gone. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone = OfTheirDtypes()
    model = fxpar.distribute(
        copy.deepcopy(alone), mesh, stages=["last"][: mesh.pipe - 1], example_inputs=(torch.ones(4, 8),)
    )
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    for rows in (4, 3, 2):
        x = torch.ones(rows, 8)
        expected, found = alone(x), step(x)
        expected.backward()
        found.backward()
        compare(f"{rows} rows on {sizes}", expected, found, alone, model)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"x": 2}], ids=str)
def test_later_traces_see_the_parameters_of_all_stages(sizes: dict[str, int]) -> None:
    run_ranks(2, check_later_traces, sizes)
