"""A small model, and what ranks find that use it wrongly; runs on every rank, apart from the tests' own libraries."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import fxpar
from fxpar._torch.distributed import device_mesh_without_groups, world_store
from fxpar.errors import FxparError
from fxpar.world.lost_peers import warning_of_a_long_wait
from tests.support.move_tensors import live_on

ATEN = {"lowering": "aten"}


class Net(nn.Module):
    """Returns a scalar before its loss, and its predictions in two forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        predicted = self.second(self.first(x).relu())
        loss = (predicted - target).square().mean()
        return {"aux": predicted.abs().mean(), "loss": loss, "predicted": predicted, "best": predicted.argmax(-1) > 0}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def alone() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def compiled(mesh: fxpar.Mesh, **options: Any) -> Any:
    """A step of two microbatches; over x, both weights are split."""
    stages = ["second"] if mesh.pipe == 2 else []
    layouts = {"first.weight": ("x", None), "second.weight": (None, "x")}
    model = fxpar.distribute(alone(), mesh, stages=stages, microbatches=2, layouts=layouts)
    return torch.compile(model, backend="fxpar", options={**ATEN, **options})


def message_of(call: Callable[[], Any]) -> str:
    """The class and text of the error that `call` raises, and the class of its cause; nothing if it raises none."""
    try:
        call()
    except FxparError as error:
        return f"{type(error).__name__}: {error} ({type(error.__cause__).__name__})"
    return ""


def use_wrongly() -> tuple[list[str], list[str], list[str]]:
    """What this rank finds of different inputs, of results on the last stage, and of results on all stages."""
    mesh = fxpar.init_mesh(pipe=2)
    return different_inputs(mesh), results_of_the_last_stage(mesh), results_on_all_stages(mesh)


def different_inputs(mesh: fxpar.Mesh) -> list[str]:
    """Rank 1 is given other targets at once, the same rows in another order in step 4, another shape, and others in
    a step without a check."""
    x, target = batch()

    def in_step_4() -> None:
        step = compiled(mesh)
        for number in range(1, 5):
            step(x.flip(0) if number == 4 and mesh.rank == 1 else x, target)

    return [
        message_of(lambda: compiled(mesh)(x, target=target + mesh.rank)),
        message_of(in_step_4),
        message_of(lambda: compiled(mesh)(x[mesh.rank * 2 :], target[mesh.rank * 2 :])),
        message_of(lambda: compiled(mesh, check_inputs=False)(x, target + mesh.rank)),
    ]


def results_of_the_last_stage(mesh: fxpar.Mesh) -> list[str]:
    """What becomes of uses of a step's results on this rank; the values themselves, moved to rank 0, come first."""
    found = compiled(mesh)(*batch())
    uses: list[Callable[[], Any]] = [
        lambda: found["predicted"].to_local(),
        lambda: found["predicted"].full_tensor(),
        lambda: found["predicted"].detach().argmax(-1),
        lambda: f"{found['aux'].item():.3f}",
        lambda: float(found["aux"].detach()),
        lambda: torch.stack([found["best"], found["best"]]),
        lambda: (found["loss"] + 10 * found["aux"]).backward(),
        lambda: found["aux"].backward(),
    ]
    first = device_mesh_without_groups("cpu", torch.tensor([0]), ("x",))
    moved = fxpar.reshard(found["predicted"], first, [Replicate()])
    right = mesh.rank == 1 or torch.allclose(moved.to_local(), alone()(*batch())["predicted"])
    return [str(right), repr(found["predicted"]), *map(message_of, uses)]


def results_on_all_stages(mesh: fxpar.Mesh) -> list[str]:
    """What is wrong with any result on this rank; and what a backward through one that is not the loss says."""
    found, expected = compiled(mesh, results="all")(*batch()), alone()(*batch())
    problems = []
    for name, wanted in expected.items():
        value = found[name] if name == "loss" else found[name].full_tensor()
        if not torch.allclose(value, wanted) or found[name].requires_grad != wanted.requires_grad:
            problems.append(f"{name}: {value} instead of {wanted}")
    refused = message_of(lambda: (found["loss"] + 10 * found["aux"]).backward())
    found["loss"].backward()
    return [*problems, refused]


def leave_early(sizes: dict[str, int]) -> str:
    """Rank 1 ends before its first step: the error of the others."""
    mesh = fxpar.init_mesh(**sizes)
    step = compiled(mesh)
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return message_of(lambda: step(*batch()))


def be_killed(sizes: dict[str, int]) -> str:
    """Rank 1 is killed between two steps: the error of the others, each rank being on a host of its own."""
    live_on(dist.get_rank())
    mesh = fxpar.init_mesh(**sizes)
    step = compiled(mesh, check_inputs=False)
    step(*batch())
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return message_of(lambda: step(*batch()))


def wait_long() -> list[str]:
    """Rank 1 comes to a collective when rank 0 has said that it has waited for long: what that said."""
    store = world_store()
    assert store is not None
    said: list[str] = []

    def tell(message: Warning | str, *unused: Any, **unused_too: Any) -> None:
        said.append(str(message))
        store.set("said", "")

    warnings.showwarning = tell
    if dist.get_rank() == 1:
        store.get("said")
    else:
        with warning_of_a_long_wait("rank 1", after_s=0.01):
            dist.barrier()
        return said
    dist.barrier()
    return said


class Classes(nn.Module):
    """Its first stage refuses what is no class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, classes: Tensor) -> Tensor:
        return self.second(self.first(torch.nn.functional.one_hot(classes, 3).float())).square().mean()


def go_on_after_a_failure() -> list[str]:
    """A step that fails on the rank of the first stage while the other one waits for it; then one that would not."""
    mesh = fxpar.init_mesh(pipe=2)
    model = fxpar.distribute(Classes(), mesh, stages=["second"], microbatches=2)
    step = torch.compile(model, backend="fxpar", options={**ATEN, "transfer_timeout_s": 3.0})
    good, bad = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 7, 1])
    step(good).backward()
    errors = []
    for classes in (bad, good, good):
        try:
            step(classes)
        except (FxparError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors
