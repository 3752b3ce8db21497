"""Mixed precision: steps compute in one dtype with parameters of another, and do what that says."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import mesh_of_one_process
from tests.support.parity import BATCH, SUBJECTS, batch_shard, loss_of, on_device

DOUBLE = fxpar.Precision(torch.float64, reduce=torch.float64)
HALF = fxpar.Precision(torch.bfloat16)

# Of doubles rounded to floats once; steps that computed or summed in floats would be off by ten times as much.
ROUNDED = 1.3e-7


def check_doubles(subject_name: str, sizes: Mapping[str, Any], lowering: str) -> None:
    """Parameters are floats, a step computes in doubles: its gradients are those of doubles, rounded. For `run_ranks`.

    Products of floats are not exact in floats, so that this shows each place where a step leaves its dtype. The models
    of transformers compute some things in floats whatever their dtype, and are of no use here.
    """
    mesh, subject = fxpar.init_mesh(**sizes), SUBJECTS[subject_name]
    torch.manual_seed(0)
    alone = subject.build(mesh.pipe).to(mesh.device_type)
    model = copy.deepcopy(alone)
    whole = on_device(mesh.device_type, subject.make_batch(BATCH * fxpar.num_batch_shards(mesh)))
    mine = batch_shard(whole, mesh)
    stages = subject.boundaries(mesh.pipe)
    fxpar.distribute(
        model, mesh, stages=stages, layouts=subject.hints, microbatches=2, example_inputs=mine, precision=DOUBLE
    )
    alone = alone.double()
    expected = loss_of(alone(**{k: v.double() if v.is_floating_point() else v for k, v in whole.items()}))
    expected.backward()
    step = torch.compile(model, backend="fxpar", options={"lowering": lowering})
    for turn in range(2):  # the second adds to the gradients of the first
        loss = loss_of(step(**mine))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        loss.backward()
        _check_rounded(model, alone, times=turn + 1)


def _check_rounded(model: nn.Module, alone: nn.Module, *, times: int) -> None:
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in model.named_parameters():
        exact = wanted[name]
        if exact is None:
            assert parameter.grad is None
            continue
        gradient = cast(DTensor, parameter.grad).full_tensor()
        assert parameter.dtype == gradient.dtype == torch.float32
        error = (gradient / times - exact).abs().max() / exact.abs().max()
        # Where doubles cancel to nothing, as for the bias of keys, only their own rounding is left.
        assert error <= ROUNDED or exact.abs().max() < 1e-12, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("subject", "mesh", "lowering"),
    [
        ("gpt", {"pipe": 2, "x": 2}, "aten"),  # the embedding is tied across stages
        ("gpt", {"pipe": 2, "z": 2}, "aten"),
        ("gpt", {"data": 2, "z": 2}, "aten"),
        ("gpt", {"pipe": 2}, "inductor"),
        ("unet", {"z": 2}, "aten"),
        ("chain", {"x": 2, "y": 2}, "aten"),  # uneven shards
    ],
)
def test_a_step_computes_gathers_crosses_and_reduces_in_its_dtypes(
    subject: str, mesh: dict[str, int], lowering: str
) -> None:
    run_ranks(math.prod(mesh.values()), check_doubles, subject, mesh, lowering)


def half_precision_losses(subject_name: str, sizes: Mapping[str, Any], num_steps: int) -> tuple[list[float], ...]:
    """Of so many steps on a mesh and alone, both in bf16 with master weights in fp32. For `run_ranks`."""
    mesh, subject = fxpar.init_mesh(**sizes), SUBJECTS[subject_name]
    torch.manual_seed(0)
    alone = subject.build(mesh.pipe).to(mesh.device_type)
    model, low = copy.deepcopy(alone), copy.deepcopy(alone).bfloat16()
    whole = on_device(mesh.device_type, subject.make_batch(BATCH * fxpar.num_batch_shards(mesh)))
    mine = batch_shard(whole, mesh)
    fxpar.distribute(model, mesh, stages=mesh.pipe, microbatches=2, example_inputs=mine, precision=HALF)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, alone)]
    found: list[float] = []
    expected: list[float] = []
    for _ in range(num_steps):
        loss = loss_of(step(**mine))
        loss.backward()
        found.append(loss.item())
        expected.append(_step_in_half(low, alone, whole))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found, expected


def _step_in_half(low: nn.Module, alone: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """Compute gradients with a copy of the parameters in bf16; returns the loss."""
    with torch.no_grad():
        for copied, master in zip(low.parameters(), alone.parameters(), strict=True):
            copied.copy_(master)
            copied.grad = None
    loss = loss_of(low(**batch))
    loss.backward()
    for copied, master in zip(low.parameters(), alone.parameters(), strict=True):
        assert copied.grad is not None
        master.grad = copied.grad.float()
    return loss.item()


@pytest.mark.parametrize("subject", ["gpt", "llama"])
def test_training_in_half_precision_stays_with_that_of_one_process(subject: str) -> None:
    check_that_losses_stay_together(run_ranks(4, half_precision_losses, subject, {"pipe": 2, "z": 2}, 200))


def check_that_losses_stay_together(by_rank: Sequence[tuple[list[float], ...]]) -> None:
    """Of what `half_precision_losses` returned on each rank."""
    for found, expected in by_rank:
        assert expected[-1] < 0.5 * expected[0], "the model learns"
        # A loss that is itself in bf16 has three digits: means over some steps have more.
        one, other = (torch.tensor(losses).view(-1, 10).mean(1) for losses in (found, expected))
        torch.testing.assert_close(one, other, rtol=0.01, atol=0)


class Normalised(nn.Module):
    """A batch norm, whose running mean is a buffer of floats, between matrices."""

    def __init__(self, last: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.expected = {"first": torch.bfloat16, "norm": torch.float32, "last": last}

    def forward(self, x: Tensor) -> Tensor:
        for name in ("first", "norm", "last"):
            self.note(name, x := getattr(self, name)(x))
        return x.float().square().mean()

    def note(self, name: str, value: Tensor) -> None:
        torch._check(value.dtype == self.expected[name])


mesh = pytest.fixture(mesh_of_one_process)


def test_modules_with_buffers_and_those_that_are_kept_compute_as_they_are_stored(mesh: fxpar.Mesh) -> None:
    def train(keep: tuple[str, ...], last: torch.dtype) -> Tensor:
        model = Normalised(last)
        batch = (torch.randn(16, 8),)
        precision = fxpar.Precision(torch.bfloat16, keep=keep)
        fxpar.distribute(model, mesh, example_inputs=batch, precision=precision)
        loss: Tensor = torch.compile(model, backend="fxpar", options={"lowering": "aten"})(*batch)
        loss.backward()
        mean = model.norm.running_mean
        assert mean is not None
        assert mean.dtype == torch.float32
        assert mean.abs().max() > 0
        return loss

    assert train((), torch.bfloat16).isfinite()
    assert train(("last.*",), torch.float32).isfinite()


def test_weights_are_gathered_and_gradients_reduced_in_the_dtypes_of_the_precision(tmp_path: Path) -> None:
    run_ranks(2, _dump_step, tmp_path)
    gathers = next(tmp_path.glob("rank0/*gather_weights*")).read_text()
    reduces = next(tmp_path.glob("rank0/*reduce_gradients*")).read_text()
    assert "all_gather" in gathers
    assert "bf16" in gathers
    assert "f32" not in gathers
    assert "reduce_scatter" in reduces
    assert "bf16" not in reduces


def sums_are_rounded(reduce: torch.dtype) -> bool:
    """Whether the gradients of a step in bf16 are all numbers of bf16. For `run_ranks`."""
    torch.manual_seed(0)
    subject = SUBJECTS["gpt"]
    model, batch = subject.build(1), subject.make_batch(BATCH)
    precision = fxpar.Precision(torch.bfloat16, reduce=reduce)
    fxpar.distribute(model, fxpar.init_mesh(z=2), microbatches=2, example_inputs=batch, precision=precision)
    loss_of(torch.compile(model, backend="fxpar", options={"lowering": "aten"})(**batch)).backward()
    gradients = [cast(DTensor, parameter.grad).to_local() for parameter in model.parameters()]
    return all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)


def test_what_an_earlier_launch_kept_serves_no_other_precision(tmp_path: Path) -> None:
    cache = {"FXPAR_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        assert run_ranks(2, sums_are_rounded, torch.float32, environment=cache) == [False, False]
        assert run_ranks(2, sums_are_rounded, torch.bfloat16, environment=cache) == [True, True]


def _dump_step(folder: Path) -> None:
    subject = SUBJECTS["llama"]
    model, batch = subject.build(1), subject.make_batch(BATCH)
    fxpar.distribute(model, fxpar.init_mesh(z=2), microbatches=2, example_inputs=batch, precision=HALF)
    options = {"lowering": "aten", "dump": str(folder), "gather_weights": "step", "reduce_gradients": "step"}
    loss_of(torch.compile(model, backend="fxpar", options=options)(**batch)).backward()


def autocast_losses(around: bool) -> tuple[float, float]:
    """Of a step of two stages under autocast, and of the same on one process. For `run_ranks`."""
    subject = SUBJECTS["llama"]
    torch.manual_seed(0)
    model: nn.Module = subject.build(4) if around else _WithAutocast(subject.build(4))
    alone, batch = copy.deepcopy(model), subject.make_batch(BATCH)
    fxpar.distribute(model, fxpar.init_mesh(pipe=2), stages=2, microbatches=2, example_inputs=batch)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        loss, expected = loss_of(step(**batch)), loss_of(alone(**batch))
    loss.backward()
    expected.backward()
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, exact = cast(DTensor, parameter.grad).full_tensor(), wanted[name].grad
        assert exact is not None
        assert (gradient - exact).norm() < 0.05 * exact.norm(), name
    return loss.item(), expected.item()


class _WithAutocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(self.inner(**batch))


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_autocast_reaches_every_stage(around: bool) -> None:
    for loss, expected in run_ranks(2, autocast_losses, around):
        assert loss == pytest.approx(expected, rel=1e-3)


def scaled_training(scale: float) -> list[tuple[float, bool]]:
    """The losses of some steps in fp16, and whether each was skipped. For `run_ranks`."""
    subject = SUBJECTS["gpt"]
    torch.manual_seed(0)
    model, batch = subject.build(2), subject.make_batch(BATCH)
    precision = fxpar.Precision(torch.float16, loss_scale=scale)
    fxpar.distribute(
        model, fxpar.init_mesh(pipe=2), stages=2, microbatches=2, example_inputs=batch, precision=precision
    )
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=2.0)
    found = []
    for _ in range(12):
        loss = loss_of(step(**batch))
        scaler.scale(loss).backward()
        before = next(model.parameters()).clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss.item(), torch.equal(before.to_local(), next(model.parameters()).to_local())))
    return found


def test_a_loss_scale_that_overflows_is_halved_and_all_ranks_skip_the_step() -> None:
    one, other = run_ranks(2, scaled_training, 2.0**20)
    skipped = [was_skipped for _, was_skipped in one]
    assert skipped == [was_skipped for _, was_skipped in other]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True), "once the scale fits, it stays"
    assert one[-1][0] < one[0][0], "the model learns"


def test_a_precision_that_makes_no_sense_is_refused(mesh: fxpar.Mesh) -> None:
    with pytest.raises(fxpar.FxparError, match=r"precision\.compute.*floating-point"):
        fxpar.Precision(torch.int8)
    with pytest.raises(fxpar.FxparError, match=r"precision\.keep.*sequence"):
        fxpar.Precision(torch.bfloat16, keep="norm")  # type: ignore[arg-type]
    with pytest.raises(fxpar.FxparError, match=r"precision\.loss_scale.*positive"):
        fxpar.Precision(torch.float16, loss_scale=0.0)
    with pytest.raises(fxpar.FxparError, match=r"'nrom\*' matches no parameter.*norm\.weight"):
        fxpar.distribute(Normalised(), mesh, precision=fxpar.Precision(torch.bfloat16, keep=("nrom*",)))
