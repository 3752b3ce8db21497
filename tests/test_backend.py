"""The backend in one process: recompiles, evaluation, results, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fxpar
from fxpar.errors import (
    GraphBreakError,
    InvalidOptionError,
    InvalidScheduleError,
    MicrobatchError,
    NoLossError,
    NotDistributedError,
    NotTheLossError,
    RecompileLimitError,
    StaleOptimizerError,
    UnknownAlgorithmError,
    UnknownLoweringError,
    UnknownOptionError,
    UnknownScheduleError,
    UnknownStrategyError,
    WrongBackendError,
)
from tests.support.fake_mesh import fake_mesh


@pytest.fixture
def mesh() -> Iterator[fxpar.Mesh]:
    """A mesh of this process alone, without any launcher."""
    yield fxpar.init_mesh()
    dist.destroy_process_group()


class Net(nn.Module):
    """Returns the loss and the predictions; with `trouble`, does what fxpar cannot trace."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.trouble = trouble

    def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Any:
        h = self.norm(self.first(x)).relu()
        if self.trouble == "graph break":
            torch._dynamo.graph_break()
        predicted = self.second(h) * scale
        if self.trouble == "no loss":
            return predicted
        return {"loss": ((predicted - target) ** 2).mean(), "predicted": predicted, "rows": x.shape[0]}


ATEN = {"lowering": "aten"}


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randn(rows, 3)


def distributed(mesh: fxpar.Mesh, microbatches: int = 1, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxpar.distribute(Net(**kwargs), mesh, microbatches=microbatches)


def alone() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def test_many_steps_compile_once_and_a_new_shape_compiles_once_more(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    torch._dynamo.utils.counters.clear()
    compiled = []
    for rows in (4, 4, 6, 6, 4):
        inputs = batch(rows)
        torch.testing.assert_close(step(*inputs)["loss"], reference(*inputs)["loss"])
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled == [1, 1, 2, 2, 2]


def test_gradients_buffers_and_other_results_are_those_of_the_model(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    inputs = batch(4)
    found, expected = step(*inputs, scale=0.5), reference(*inputs, scale=0.5)
    found["loss"].backward()
    expected["loss"].backward()
    assert isinstance(found["predicted"], DTensor)
    torch.testing.assert_close(found["predicted"].full_tensor(), expected["predicted"].detach())
    assert found["rows"] == expected["rows"]
    for (name, mine), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, msg=lambda text, n=name: f"{n}: {text}")
    for (name, mine), (_, other) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, n=name: f"{n}: {text}")


def test_buffers_are_updated_in_the_order_of_microbatches(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh, microbatches=2), alone()
    x, target = batch(8)
    torch.compile(model, backend="fxpar", options=ATEN)(x, target)
    for part, goal in zip(x.chunk(2), target.chunk(2), strict=True):
        reference(part, goal)
    torch.testing.assert_close(model.norm.running_mean, reference.norm.running_mean)
    assert model.norm.num_batches_tracked == 2


def test_evaluation_without_grad_runs_forward_alone(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh, microbatches=2), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    model.eval()
    reference.eval()
    inputs = batch(4)
    with torch.no_grad():
        found, expected = step(*inputs), reference(*inputs)
    assert not found["loss"].requires_grad
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(found["predicted"].full_tensor(), expected["predicted"])


def test_a_model_without_loss_evaluates_but_does_not_train(mesh: fxpar.Mesh) -> None:
    model = distributed(mesh, trouble="no loss")
    step = torch.compile(model, backend="fxpar", options=ATEN)
    with torch.no_grad():
        assert step(*batch(4)).shape == (4, 3)
    with pytest.raises(NoLossError, match=r"scalar loss.*it returned .*\(4, 3\)"):
        step(*batch(4))


def test_gradients_accumulate_over_steps_and_scale_with_the_loss(mesh: fxpar.Mesh) -> None:
    model, reference = distributed(mesh), alone()
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for factor in (1.0, 3.0):
        inputs = batch(4)
        (step(*inputs)["loss"] * factor).backward()
        (reference(*inputs)["loss"] * factor).backward()
    torch.testing.assert_close(model.second.weight.grad.full_tensor(), reference.second.weight.grad)


def test_a_second_backward_through_one_loss_is_an_error(mesh: fxpar.Mesh) -> None:
    loss = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)(*batch(4))["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="returned once"):
        loss.backward()


def test_a_frozen_parameter_gets_no_gradient(mesh: fxpar.Mesh) -> None:
    model = Net()
    model.first.weight.requires_grad_(False)
    fxpar.distribute(model, mesh)
    torch.compile(model, backend="fxpar", options=ATEN)(*batch(4))["loss"].backward()
    assert model.first.weight.grad is None
    assert model.first.bias.grad is not None


def test_a_graph_break_is_an_error_with_its_reason_and_line(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh, trouble="graph break"), backend="fxpar", options=ATEN)
    with pytest.raises(GraphBreakError, match=r"graph_break.*User-inserted.*\n.*test_backend.py:\d+ in forward"):
        step(*batch(4))


def test_a_batch_that_microbatches_do_not_divide_is_an_error(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh, microbatches=4), backend="fxpar", options=ATEN)
    with pytest.raises(
        MicrobatchError, match=r"argument 'x' has a batch of 6, which 4 microbatches do not divide.*multiple of 4"
    ):
        step(*batch(6))


def test_a_schedule_of_forwards_evaluates_but_does_not_train(mesh: fxpar.Mesh) -> None:
    options = {**ATEN, "schedule": [["0F0", "0F1"]]}
    step = torch.compile(distributed(mesh, microbatches=2), backend="fxpar", options=options)
    with torch.no_grad():
        assert torch.isfinite(step(*batch(4))["loss"])
    with pytest.raises(InvalidScheduleError, match="rank 0: 0B0 is missing"):
        step(*batch(4))


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


@dataclass
class Output:
    aux: Tensor
    loss: Tensor


pytree.register_dataclass(Output)

LOSSES: dict[str, Callable[[Any], list[Any]]] = {
    "named": lambda found: [found["loss"]],
    "named tuple": lambda found: [found.loss],
    "dataclass": lambda found: [found.loss],
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


def test_an_optimizer_made_before_distribute_is_refused_when_it_steps(mesh: fxpar.Mesh) -> None:
    model, other = Net(), nn.Linear(2, 2)
    early, unrelated = torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), lr=1.0)
    early.step()
    fxpar.distribute(model, mesh)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.compile(model, backend="fxpar", options=ATEN)(*batch(4))["loss"].backward()
    unrelated.step()
    late.step()
    with pytest.raises(
        StaleOptimizerError, match=r"AdamW updates.*\(first.weight, first.bias, norm.weight and 3 others"
    ):
        early.step()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("with_grad", [True, False])
def test_another_backend_is_refused_with_the_right_one(mesh: fxpar.Mesh, backend: str, with_grad: bool) -> None:
    step = torch.compile(distributed(mesh), backend=backend)
    with torch.set_grad_enabled(with_grad), pytest.raises(Exception, match='backend="fxpar"') as raised:
        step(*batch(4))
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), WrongBackendError)


def test_shapes_beyond_the_recompile_limit_are_an_error_that_names_it(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)
    with torch._dynamo.config.patch(recompile_limit=2):
        step(*batch(4))
        step(*batch(6))
        with pytest.raises(RecompileLimitError, match=r"compiled 2 times.*limit is 2.*_dynamo.config.recompile_limit"):
            step(*batch(8))


def test_training_a_model_that_is_not_distributed_is_refused_where_a_mesh_divides_models() -> None:
    def run(**sizes: int) -> None:
        torch.compiler.reset()
        with fake_mesh(**sizes):
            torch.compile(nn.Linear(6, 3), backend="fxpar", options=ATEN)(batch(4)[0])

    with pytest.raises(NotDistributedError, match=r"pipe=2.*fxpar.distribute\(model, mesh, ...\)"):
        run(pipe=2)
    with pytest.warns(UserWarning, match="a model to train that is not distributed"):
        run(data=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        with torch.no_grad():
            run(pipe=2)
    with fake_mesh(pipe=2) as pair:
        kept = fxpar.distribute(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), pair, stages=["1"])
        with pytest.warns(UserWarning, match="a model to train that is not distributed"):
            torch.compiler.reset()
            torch.compile(nn.Linear(6, 3), backend="fxpar", options=ATEN)(batch(4)[0])
        assert kept is not None, "it was there all the time"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dumps": "x"}, UnknownOptionError, "unknown option 'dumps'.*did you mean 'dump'"),
        ({"dump": 3}, InvalidOptionError, "'dump' is 3: expected a directory"),
        ({"lowering": "atn"}, UnknownLoweringError, "unknown lowering 'atn'.*did you mean 'aten'"),
        ({"schedule": "zigzag"}, UnknownScheduleError, "unknown schedule 'zigzag'"),
        ({"strategy": "broadkast"}, UnknownStrategyError, "unknown resharding strategy 'broadkast'.*'broadcast'"),
        ({"algorithm": "gredy"}, UnknownAlgorithmError, "unknown algorithm 'gredy'.*did you mean 'greedy'"),
        ({"results": "first"}, InvalidOptionError, "'results' is 'first': expected 'last_stage' or 'all'"),
        ({"check_inputs": 3}, InvalidOptionError, "'check_inputs' is 3: expected True or False"),
        (
            {"transfer_timeout_s": 0},
            InvalidOptionError,
            "'transfer_timeout_s' is 0: expected a positive number of seconds",
        ),
    ],
)
def test_bad_options_are_refused(
    mesh: fxpar.Mesh, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=options)
    with pytest.raises(error, match=message):
        step(*batch(4))


def test_a_model_that_is_not_distributed_compiles_for_one_device() -> None:
    model = alone()
    inputs = batch(4)
    expected = copy.deepcopy(model)(*inputs)["loss"]
    torch.testing.assert_close(torch.compile(model, backend="fxpar", options=ATEN)(*inputs)["loss"], expected)


def test_dumps_are_numbered_in_the_order_of_the_passes(mesh: fxpar.Mesh, tmp_path: Path) -> None:
    torch.compile(distributed(mesh), backend="fxpar", options={**ATEN, "dump": tmp_path})(*batch(4))
    names = sorted(path.name.partition(".")[0].partition("_")[2] for path in (tmp_path / "rank0").iterdir())
    passes = [
        "capture",
        "split_stages",
        "trace_joint",
        "logical_random",
        "decompose_for_sharding",
        "propagate_layouts",
        "insert_reshards",
        "insert_collectives",
        "partition_forward",
        "partition_backward",
        "overlap_collectives_forward",
        "overlap_collectives_backward",
        "schedule",
        "program",
        "memory",
        "costs",
    ]
    assert names == sorted(passes)
    numbered = sorted((tmp_path / "rank0").iterdir())
    assert [path.name.partition(".")[0].partition("_")[2] for path in numbered] == passes
    assert "first" in (tmp_path / "rank0" / "01_capture.py").read_text()
