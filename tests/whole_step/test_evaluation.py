"""Steps without grad equal those of one process, and run the graphs of a training step if there was one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F

import fxpar
from fxpar.errors import MemoryBudgetError
from fxpar.world.launch import run_ranks
from tests.support.derivations import note_derivations

MICROBATCHES, ROWS = 2, 4
MANY = 64
OPTIONS = {"lowering": "aten", "results": "all"}


class Tied(nn.Module):
    """Running statistics in its first stage, and a parameter that both stages use; returns the loss and predictions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.dropout(self.norm(self.first(x)).relu())
        predicted = self.second(h)
        return {"predicted": predicted, "loss": F.mse_loss(predicted, target)}


def build(mesh: fxpar.Mesh, dropout: float = 0.0, microbatches: int = MICROBATCHES) -> tuple[nn.Module, nn.Module]:
    """The distributed model, and the same for one process."""
    torch.manual_seed(0)
    model = Tied(dropout)
    alone = copy.deepcopy(model)
    stages = ["second"] if mesh.pipe > 1 else []
    hints = {"first.weight": ("x", None)} if mesh.x > 1 else {}
    inputs = torch.zeros(microbatches * ROWS, 8), torch.zeros(microbatches * ROWS, 8)
    fxpar.distribute(model, mesh, stages=stages, layouts=hints, microbatches=microbatches, example_inputs=inputs)
    return model, alone


def reference(alone: nn.Module, parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What one process computes on batch shards, microbatch by microbatch; the first shard changes the buffers."""
    found: list[dict[str, Tensor]] = []
    changed: list[dict[str, Tensor]] = []
    for x, target in parts:
        buffers = dict(alone.named_buffers())
        for each in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # autograd keeps those before
            found.append(functional_call(alone, buffers, each))
        changed.append(buffers)
    counted = alone.norm.num_batches_tracked + alone.training  # steps, whatever the number of microbatches
    for name, buffer in changed[0].items():
        alone.get_buffer(name).copy_(counted if name.endswith("num_batches_tracked") else buffer)
    losses = torch.stack([each["loss"] for each in found])
    return {"loss": losses.mean(), "predicted": torch.cat([each["predicted"] for each in found])}


def check_evaluations(sizes: Mapping[str, int]) -> None:
    """Training steps and evaluations by turns, either first, and an evaluation in `eval()` mode."""
    mesh = fxpar.init_mesh(**sizes)
    shards, rank = fxpar.num_batch_shards(mesh), fxpar.batch_rank(mesh)
    derived = note_derivations()
    for turns in ((True, False, True, False), (False, True, False, True)):
        model, alone = build(mesh)
        step = torch.compile(model, backend="fxpar", options=OPTIONS)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
        for number, trains in enumerate(turns):
            batch = [(torch.randn(MICROBATCHES * ROWS, 8), torch.randn(MICROBATCHES * ROWS, 8)) for _ in range(shards)]
            derived.clear()
            torch._dynamo.utils.counters.clear()
            with torch.set_grad_enabled(trains):
                found, expected = step(*batch[rank]), reference(alone, batch)
            check_equal(found, expected, model, alone)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0, "distribute's trace serves all"
            if number > 0 and not trains:
                assert derived == [], "an evaluation after a training step derives nothing"
            if trains:
                found["loss"].backward()
                expected["loss"].backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        model.eval()
        alone.eval()
        with torch.no_grad():
            check_equal(step(*batch[rank]), reference(alone, batch), model, alone)


def check_equal(found: Mapping[str, Any], expected: Mapping[str, Tensor], model: nn.Module, alone: nn.Module) -> None:
    """Both results, on every rank, and the buffers that this rank holds."""
    assert found["loss"].requires_grad == expected["loss"].requires_grad
    torch.testing.assert_close(found["loss"], expected["loss"])
    assert isinstance(found["predicted"], DTensor)
    torch.testing.assert_close(found["predicted"].full_tensor(), expected["predicted"].detach())
    if model.norm._parameters.get("weight") is not None:  # its stage is this rank's
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, alone.get_buffer(name), msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"x": 2}, {"z": 2}, {"pipe": 2, "x": 2}])
def test_evaluations_before_and_after_training_steps_equal_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_evaluations, sizes)


def same_mask(lowering: str) -> None:
    """An evaluation in training mode draws what the next training step draws, whichever graphs it runs."""
    mesh = fxpar.init_mesh(pipe=2)
    model, _ = build(mesh, dropout=0.5)
    step = torch.compile(model, backend="fxpar", options={"lowering": lowering})
    batch = torch.randn(MICROBATCHES * ROWS, 8), torch.randn(MICROBATCHES * ROWS, 8)
    losses = []
    for trains in (False, True, False, True):
        with torch.set_grad_enabled(trains):
            losses.append(step(*batch)["loss"].detach())
    forward_alone, first, by_its_graphs, second = losses
    torch.testing.assert_close(forward_alone, first)
    assert first != second, "each training step draws another mask"
    assert by_its_graphs == second, "the graphs of the training step, the same bits"


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_an_evaluation_draws_the_masks_of_the_next_training_step(lowering: str) -> None:
    run_ranks(2, same_mask, lowering)


def evaluate_in_inference_mode() -> None:
    """An evaluation in inference mode leaves nothing behind that a training step could not write to."""
    mesh = fxpar.init_mesh(pipe=2)
    model, alone = build(mesh)
    step = torch.compile(model, backend="fxpar", options=OPTIONS)
    batch = [(torch.randn(MICROBATCHES * ROWS, 8), torch.randn(MICROBATCHES * ROWS, 8))]
    for trains in (True, False, False, True, True):
        with torch.inference_mode(not trains):
            check_equal(step(*batch[0]), reference(alone, batch), model, alone)


def test_evaluations_in_inference_mode_and_training_steps_take_turns() -> None:
    run_ranks(2, evaluate_in_inference_mode)


class Wide(nn.Module):
    """What its stages exchange is most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean()


def evaluate_in_little_memory(memory_bytes: int) -> str:
    """The error of an evaluation after a training step that fits."""
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(MANY * ROWS, 8)
    fxpar.distribute(model, fxpar.init_mesh(pipe=2), stages=["second"], microbatches=MANY, example_inputs=(x,))
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten", "memory_bytes": memory_bytes})
    step(x)
    try:
        with torch.no_grad():
            step(x)
    except MemoryBudgetError as error:
        return str(error)
    return "it fits"


def test_an_evaluation_that_cannot_fit_is_refused_though_the_training_step_fits() -> None:
    """An evaluation keeps what it sends to the end: that is more than what training keeps of few microbatches."""
    first, last = run_ranks(2, evaluate_in_little_memory, 40_000)
    assert first == last
    assert "made 0.1" in first


class Encoder(nn.Module):
    """PyTorch's own layers, which evaluate by one op for a whole layer where they can."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.encoder(x)).square().mean()
        return loss


def check_encoder(sizes: Mapping[str, int]) -> None:
    """Training and evaluation mode. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone, x = Encoder(), torch.randn(4, 3, 8)
    model = copy.deepcopy(alone)
    stages = ["encoder.layers.1"][: mesh.pipe - 1]
    fxpar.distribute(model, mesh, stages=stages, microbatches=2, example_inputs=(x,))
    step = torch.compile(model, backend="fxpar", options=OPTIONS)
    torch.testing.assert_close(step(x), alone(x))
    with torch.no_grad():
        torch.testing.assert_close(step.eval()(x), alone.eval()(x))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("sizes", [{"x": 2}, {"pipe": 2}], ids=str)
def test_encoder_layers_evaluate_op_by_op(sizes: dict[str, int]) -> None:
    run_ranks(2, check_encoder, sizes)
