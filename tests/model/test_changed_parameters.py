"""What scripts set on parameters, before and after `distribute`, holds as on one process, or is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import CompiledTooEarlyError, ReplacedParameterError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import batch_shard
from tests.support.small import Small

mesh = pytest.fixture(mesh_of_one_process)


def average(model: Small, step: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> list[float]:
    """Losses of a training, between whose steps averages of the weights take their place, as shadows of them."""
    shadows = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(3):
        step(**batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        backups = {}
        for name, parameter in model.named_parameters():
            shadows[name].lerp_(parameter.data, 0.5)
            backups[name] = parameter.data
            parameter.data = shadows[name]
        with torch.no_grad():
            losses.append(step(**batch).item())
        for name, parameter in model.named_parameters():
            parameter.data = backups[name]
        with torch.no_grad():
            losses.append(step(**batch).item())
    return losses


def check_averages(sizes: Mapping[str, int]) -> None:
    """Compare losses and weights with those of one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(1)
    alone, whole = Small(), {"x": torch.randn(4, 4)}
    expected = average(alone, alone, whole)
    model, part = Small(), batch_shard(whole, mesh)
    fxpar.distribute(model, mesh, stages=["layers.2"][: mesh.pipe - 1], example_inputs=part)
    found = average(model, torch.compile(model, backend="fxpar", options=ATEN), part)
    assert found == pytest.approx(expected, rel=1e-5)
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = 2 * wanted[name].detach()
        torch.testing.assert_close(parameter.full_tensor(), 2 * wanted[name])
    data = [parameter.data for parameter in model.parameters()]
    torch._foreach_copy_(data, [each * 2 for each in data])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), 4 * wanted[name])


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"x": 2}, {"z": 2}], ids=str)
def test_data_may_be_assigned(sizes: dict[str, int]) -> None:
    run_ranks(2, check_averages, sizes)


def check_gradients(sizes: Mapping[str, int]) -> None:
    """Add the gradients of a step to those from before `distribute`, on a mesh and on one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    alone, model = Small(), Small()
    torch.manual_seed(1)
    whole = {"x": torch.randn(4, 4)}
    part = batch_shard(whole, mesh)
    for each in (alone, model):
        each(**whole).backward()
    fxpar.distribute(model, mesh, stages=["layers.2"][: mesh.pipe - 1], example_inputs=part)
    torch.compile(model, backend="fxpar", options=ATEN)(**part).backward()
    alone(**whole).backward()
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"x": 2}, {"z": 2}], ids=str)
def test_gradients_from_before_distribute_are_added_to(sizes: dict[str, int]) -> None:
    run_ranks(2, check_gradients, sizes)


def test_attributes_and_hooks_of_parameters_stay_theirs(mesh: fxpar.Mesh) -> None:
    model, seen = Small(), list[Tensor]()
    weight = model.layers[0].weight
    weight.decay = 0.1
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    fxpar.distribute(model, mesh, example_inputs=(torch.ones(2, 4),))
    torch.compile(model, backend="fxpar", options=ATEN)(torch.ones(2, 4)).backward()
    alone = Small()
    alone(torch.ones(2, 4)).backward()
    assert model.layers[0].weight.decay == 0.1
    (gradient,) = seen
    torch.testing.assert_close(gradient.full_tensor(), 2 * alone.layers[0].weight.grad)


def test_what_takes_the_place_of_a_parameter_is_refused(mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Small(), mesh, example_inputs=(torch.ones(2, 4),))
    step, first = torch.compile(model, backend="fxpar", options=ATEN), model.layers[0]
    with pytest.raises(ReplacedParameterError, match=r"expected torch.float32 \(4, 4\).*found torch.float64 \(4, 4\)"):
        first.weight.data = first.weight.data.double()
    first.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ReplacedParameterError, match=r"parameter layers\.0\.weight: .*found a plain tensor"):
        step(torch.ones(2, 4))
    first.weight = None
    with pytest.raises(ReplacedParameterError, match=r"parameter layers\.0\.weight: .*found None"):
        step(torch.ones(2, 4))


def test_a_model_is_compiled_after_it_is_distributed(mesh: fxpar.Mesh) -> None:
    model = Small()
    compiled = torch.compile(model, backend="fxpar", options=ATEN)
    with pytest.raises(CompiledTooEarlyError, match=r"Small was given to torch.compile before fxpar.distribute"):
        fxpar.distribute(compiled, mesh)
    fxpar.distribute(model, mesh, example_inputs=(torch.ones(2, 4),))
    with pytest.raises(CompiledTooEarlyError, match=r"expected fxpar.distribute\(model, ...\) first"):
        compiled(torch.ones(2, 4))
