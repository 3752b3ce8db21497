"""Models that read numbers from tensors, by `Tensor.item()`, compute what they compute on one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import UnsupportedGraphError
from fxpar.world.launch import RankFailedError, run_ranks
from tests.support.number_readers import READS, READS_OF_SHAPES, Checked, Reading
from tests.support.one_process import ATEN, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)

NO_CACHE = {"FXPAR_CACHE_DIR": ""}


INPUTS = torch.linspace(-1, 1, 12).view(3, 4), torch.tensor([2, 3, 1])


def gradients(model: nn.Module, step: Callable[..., Tensor]) -> list[Tensor]:
    """The loss, and the gradients of the parameters."""
    loss = step(*INPUTS)
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)]


def model_of(read: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Reading(read)


@pytest.mark.parametrize("read", READS)
def test_numbers_are_those_of_eager_mode(mesh: fxpar.Mesh, read: Callable[[Tensor, Tensor], Tensor]) -> None:
    alone, model = model_of(read), fxpar.distribute(model_of(read), mesh)
    found = gradients(model, torch.compile(model, backend="fxpar", options=ATEN))
    torch.testing.assert_close(found, gradients(alone, alone), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("read", READS_OF_SHAPES)
def test_numbers_that_decide_shapes_are_refused(mesh: fxpar.Mesh, read: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = fxpar.distribute(model_of(read), mesh)
    with pytest.raises(UnsupportedGraphError, match=r"needs its value: File .*number_readers.*\n.*\.tolist\(\)"):
        torch.compile(model, backend="fxpar", options=ATEN)(*INPUTS)


def loss_of_stages(lengths: Tensor) -> float:
    mesh = fxpar.init_mesh(pipe=2)
    torch.manual_seed(0)
    model = fxpar.distribute(Checked(), mesh, microbatches=1, example_inputs=(INPUTS[0], lengths))
    loss: Tensor = torch.compile(model, backend="fxpar", options=ATEN)(INPUTS[0], lengths)
    loss.backward()
    return loss.item()


def test_a_stage_may_have_assertions_alone() -> None:
    torch.manual_seed(0)
    expected = Checked()(*INPUTS).item()
    assert run_ranks(2, loss_of_stages, INPUTS[1], environment=NO_CACHE) == pytest.approx([expected] * 2, rel=1e-6)


def test_an_assertion_fails_by_its_source_line() -> None:
    with pytest.raises(RankFailedError, match=r"about a number in a tensor failed: File .*number_readers"):
        run_ranks(2, loss_of_stages, INPUTS[1] + 4, environment=NO_CACHE)
