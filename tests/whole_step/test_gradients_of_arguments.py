"""Arguments may require grad: what a script computes before a distributed model is trained as on one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F

import fxpar
from fxpar.errors import BatchMixingWarning, SecondDerivativeError, UnsupportedGraphError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.queued_groups import on_queued_groups

ROWS, WIDTH, CLASSES = 8, 6, 3

mesh = pytest.fixture(mesh_of_one_process)


class Scores(nn.Module):
    """Every layer, and so every stage, reads the input."""

    def __init__(self, results: int = CLASSES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, results)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h + x)) * x
        scores: Tensor = self.out(h)
        return scores


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Scores()

    def forward(self, x: Tensor, classes: Tensor, more: Any = None) -> Tensor:
        scores = self.body(x)
        if more is not None:
            scores = (scores * more["of samples"] + more["of classes"][0]) / more["temperature"]
        return F.cross_entropy(scores, classes)


class Forces(nn.Module):
    """The loss is of a gradient by the argument, which the forward takes, and has itself one by the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Scores(1)

    def forward(self, positions: Tensor, forces: Tensor) -> Tensor:
        energies = self.body(positions)
        (found,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return (found - forces).square().mean() + energies.square().mean()


@dataclass(frozen=True)
class World:
    """One process, or the ranks of a mesh, among which batches are divided."""

    mesh: fxpar.Mesh | None = None
    microbatches: int = 1

    @property
    def num_shards(self) -> int:
        return 1 if self.mesh is None else fxpar.num_batch_shards(self.mesh)

    def own(self, whole: Tensor) -> Tensor:
        """A copy of this rank's batch shard."""
        return whole.chunk(self.num_shards)[0 if self.mesh is None else fxpar.batch_rank(self.mesh)].clone()

    def compiled(self, model: nn.Module, *inputs: Any) -> Callable[..., Any]:
        if self.mesh is None:
            return model
        stages = ["body.layers.2" if hasattr(model, "body") else "layers.2"][: self.mesh.pipe - 1]
        microbatches = self.microbatches
        fxpar.distribute(model, self.mesh, stages=stages, microbatches=microbatches, example_inputs=inputs)
        return torch.compile(model, backend="fxpar", options=ATEN)

    def mean(self, value: Tensor) -> Tensor:
        """That over batch shards, as DistributedDataParallel takes it of gradients."""
        value = value.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value

    def whole(self, gradient: Tensor) -> Tensor:
        """The gradient of the mean loss by all samples, from each rank's gradient of its own loss by its own ones."""
        if self.mesh is None:
            return gradient
        terms = torch.zeros(self.num_shards, *gradient.shape)
        terms[fxpar.batch_rank(self.mesh)] = gradient
        return self.mean(terms).flatten(0, 1)

    def descend(self, parameters: Iterator[nn.Parameter]) -> None:
        """A step on parameters that every rank has whole."""
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data -= 0.1 * self.mean(parameter.grad)
            parameter.grad = None


Scene: TypeAlias = Callable[[World], Iterator[Tensor]]


def adversaries(world: World) -> Iterator[Tensor]:
    """A generator and a discriminator, both distributed; each loss is computed by the script."""
    make, judge = Scores(WIDTH), Scores(1)
    noise, real = torch.randn(2, 3, ROWS, WIDTH)
    made, judged = world.compiled(make, world.own(noise[0])), world.compiled(judge, world.own(real[0]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2) for each in (make, judge)]
    for step in range(3):
        fake = made(world.own(noise[step]))
        lost = F.softplus(-judged(world.own(real[step]))).mean() + F.softplus(judged(fake.detach())).mean()
        lost.backward()
        optimizers[1].step()
        won = F.softplus(-judged(fake)).mean()
        won.backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield from (world.mean(lost), world.mean(won))


def encoder(world: World) -> Iterator[Tensor]:
    """A trained module before, and a distributed model before that."""
    first, between, last = Scores(WIDTH), nn.Linear(WIDTH, WIDTH), Classifier()
    x, classes = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    begun, ended = world.compiled(first, world.own(x)), world.compiled(last, world.own(x), world.own(classes))
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.2)
    for _ in range(3):
        loss = ended(between(begun(world.own(x))), world.own(classes))
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        world.descend(between.parameters())
        yield world.mean(loss)


def judge_that_stays(world: World) -> Iterator[Tensor]:
    """A frozen model whose results a loss compares, as a perceptual loss does."""
    features, trained = Scores().requires_grad_(False), nn.Linear(WIDTH, WIDTH)
    x, wanted = torch.randn(2, ROWS, WIDTH)
    of = world.compiled(features, world.own(x))
    for _ in range(2):
        with torch.no_grad():
            target = of(world.own(wanted))
        loss = F.mse_loss(of(trained(world.own(x))), target)
        loss.backward()
        world.descend(trained.parameters())
        yield world.mean(loss)


def perturbed(world: World) -> Iterator[Tensor]:
    """Steps on samples that were moved along their gradients, with evaluations between."""
    model, classes = Classifier(), torch.randint(0, CLASSES, (ROWS,))
    whole = torch.randn(ROWS, WIDTH)
    step = world.compiled(model, world.own(whole), world.own(classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        x, y = world.own(whole).requires_grad_(), world.own(classes)
        (gradient,) = torch.autograd.grad(step(x, y), x)
        yield world.whole(gradient)
        loss = step((x + 0.1 * gradient.sign()).detach(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            yield from (world.mean(loss), world.mean(step(x, y)))


def nested(world: World) -> Iterator[Tensor]:
    """Arguments in dicts and lists, of samples and shared by all; gradients accumulate over two calls."""
    model, x, classes = Classifier(), torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    of_samples, of_classes, temperature = torch.randn(ROWS, CLASSES), torch.randn(CLASSES), torch.tensor(2.0)

    def more() -> dict[str, Any]:
        return {"of samples": world.own(of_samples), "of classes": [of_classes.clone()], "temperature": temperature + 0}

    step = world.compiled(model, world.own(x), world.own(classes), more())
    given = more()
    leaves = [given["of samples"], *given["of classes"], given["temperature"]]
    for leaf in leaves:
        leaf.requires_grad_()
    for factor in (1.0, 0.5):
        (step(world.own(x) * factor, world.own(classes), given) / 2).backward()
    yield from (world.whole(leaves[0].grad), world.mean(leaves[1].grad), world.mean(leaves[2].grad))


def forces(world: World) -> Iterator[Tensor]:
    model, (x, wanted) = Forces(), torch.randn(2, ROWS, WIDTH)
    step = world.compiled(model, world.own(x).requires_grad_(), world.own(wanted))
    positions = world.own(x).requires_grad_()
    loss = step(positions, world.own(wanted))
    loss.backward()
    yield from (world.mean(loss), world.whole(positions.grad))


def global_tensors(world: World) -> Iterator[Tensor]:
    """A DTensor holds the samples of all batch shards, and so does its gradient."""
    model, x, classes = Classifier(), torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    step = world.compiled(model, world.own(x), world.own(classes))
    if world.mesh is None:
        step(x.requires_grad_(), classes).backward()
        yield x.grad
        return
    axes = world.mesh.stage_mesh
    x, classes = (distribute_tensor(each, axes, [Replicate()] * axes.ndim) for each in (x, classes))
    step(x.requires_grad_(), classes).backward()
    yield x.grad.full_tensor()


SCENES: Mapping[str, Scene] = {
    scene.__name__: scene
    for scene in (adversaries, encoder, judge_that_stays, perturbed, nested, forces, global_tensors)
}


def check(sizes: Mapping[str, int], microbatches: int, names: Sequence[str]) -> None:
    """For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for name in names:
        torch.manual_seed(0)
        expected = list(SCENES[name](World()))
        torch.manual_seed(0)
        found = list(SCENES[name](World(mesh, microbatches)))
        torch.testing.assert_close(found, expected, msg=lambda text, of=name: f"{of} on {sizes}: {text}")


@pytest.mark.parametrize(
    "names", [("adversaries", "encoder"), ("judge_that_stays", "perturbed"), tuple(SCENES)[4:]], ids=str
)
@pytest.mark.parametrize(("sizes", "microbatches"), [({"pipe": 2}, 2), ({"z": 2}, 1), ({"x": 2}, 2)], ids=str)
def test_gradients_of_arguments_are_those_of_one_process(
    sizes: dict[str, int], microbatches: int, names: Sequence[str]
) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes, microbatches, names)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}], ids=str)
def test_ranks_whose_groups_are_queues_give_them_as_well(sizes: dict[str, int]) -> None:
    run_ranks(2, on_queued_groups, check, sizes, 1, ("encoder", "nested"))


class Products(nn.Module):
    """Of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.left(x)) * self.right(y)


@pytest.mark.parametrize("again", [lambda x: x, lambda x: x.view(ROWS, WIDTH)], ids=["same", "view"])
def test_a_tensor_that_is_two_arguments_has_the_sum_of_their_gradients(
    again: Callable[[Tensor], Tensor], mesh: fxpar.Mesh
) -> None:
    torch.manual_seed(0)
    alone = Products()
    model = copy.deepcopy(alone)
    step = torch.compile(fxpar.distribute(model, mesh), backend="fxpar", options=ATEN)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    found, expected = (torch.autograd.grad(run(y := x * 2, again(y)).square().sum(), x) for run in (step, alone))
    torch.testing.assert_close(found, expected)


class Weighted(Classifier):
    """A mean that is weighted by an argument."""

    def forward(self, x: Tensor, classes: Tensor, more: Any = None) -> Tensor:
        return (F.cross_entropy(self.body(x), classes, reduction="none") * more).sum() / more.sum()


def test_what_a_loss_is_divided_by_is_that_of_a_microbatch_if_it_requires_grad(mesh: fxpar.Mesh) -> None:
    """Otherwise it is that of the whole batch, which is computed before the step."""
    torch.manual_seed(0)
    alone, classes = Weighted(), torch.zeros(ROWS, dtype=torch.long)
    model = fxpar.distribute(copy.deepcopy(alone), mesh, microbatches=2)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    x, weights = torch.randn(ROWS, WIDTH), torch.rand(ROWS, requires_grad=True)
    with pytest.warns(BatchMixingWarning, match="in 2 microbatches"):
        loss = step(x, classes, weights)
    halves = zip(x.chunk(2), classes.chunk(2), weights.chunk(2), strict=True)
    expected = torch.stack([alone(*half) for half in halves]).mean()
    torch.testing.assert_close(
        (loss, *torch.autograd.grad(loss, weights)), (expected, *torch.autograd.grad(expected, weights))
    )


class Unread(Classifier):
    """Reads no second tensor."""

    def forward(self, x: Tensor, classes: Tensor, more: Any = None) -> Tensor:
        return super().forward(x, classes)


def test_what_nothing_depends_on_has_a_gradient_of_zeros(mesh: fxpar.Mesh) -> None:
    step = torch.compile(fxpar.distribute(Unread(), mesh), backend="fxpar", options=ATEN)
    x, unread = torch.randn(2, ROWS, WIDTH, requires_grad=True).unbind()
    unread.retain_grad()
    step(x, torch.zeros(ROWS, dtype=torch.long), unread).backward()
    assert not unread.grad.any()


@pytest.mark.parametrize("returns_loss", [True, False])
def test_gradients_cannot_be_differentiated_again(returns_loss: bool, mesh: fxpar.Mesh) -> None:
    model = Classifier() if returns_loss else Scores()
    step = torch.compile(fxpar.distribute(model, mesh), backend="fxpar", options=ATEN)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = step(x, torch.zeros(ROWS, dtype=torch.long)) if returns_loss else step(x).sum()
    with pytest.raises(SecondDerivativeError, match="inside the forward"):
        torch.autograd.grad(loss, x, create_graph=True)


class Doubled(Classifier):
    """Changes its argument."""

    def forward(self, x: Tensor, classes: Tensor, more: Any = None) -> Tensor:
        return super().forward(x.mul_(2), classes)


def test_a_forward_cannot_change_an_argument_that_requires_grad(mesh: fxpar.Mesh) -> None:
    step = torch.compile(fxpar.distribute(Doubled(), mesh), backend="fxpar", options=ATEN)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(UnsupportedGraphError, match=r"changes an argument .* that requires grad.*x\.clone\(\)"):
        step(x * 1, torch.zeros(ROWS, dtype=torch.long))
