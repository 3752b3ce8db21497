"""Forwards that keep tensors on modules: in buffers for the next step, elsewhere only for the rest of this one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

import fxpar
from fxpar.errors import UnavailableTensorError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import batch_shard, compare

MICROBATCHES = 2

mesh = pytest.fixture(mesh_of_one_process)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Chain(nn.Module):
    """Layers and a loss to which a subclass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.after(number, layer(x))
        return x.square().mean() + self.added()

    def after(self, number: int, x: Tensor) -> Tensor:
        return x

    def added(self) -> Tensor | float:
        return 0.0


class Losses(Chain):
    """As mixtures of experts do: each layer keeps a loss of its own, and the model adds up those that are there."""

    def after(self, number: int, x: Tensor) -> Tensor:
        if number % 2:
            self.layers[number].auxiliary = x.abs().mean()
        return x

    def added(self) -> Tensor | float:
        return sum((0.1 * each.auxiliary for each in self.layers if hasattr(each, "auxiliary")), start=torch.zeros(()))


class Hooked(Chain):
    """Hooks collect what layers return in a list, and the last values in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.last = list[Tensor](), dict[str, Tensor]()
        for layer in self.layers:
            layer.register_forward_hook(lambda _, args, output: self.seen.append(output.abs().mean()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        loss: Tensor = super().forward(x)
        self.last["loss"] = loss.detach()
        return loss

    def added(self) -> Tensor:
        return 0.1 * torch.stack(self.seen).sum()


class Pruned(Chain):
    """Before each forward, masked weights are put where the layers look for their weights."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            prune.l1_unstructured(layer.up, "weight", 0.5)


class Spectral(Chain):
    """Each forward improves buffers, by an op that writes to them and by assigning its result."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            spectral_norm(layer.up)


class Codebook(Chain):
    """Vectors are quantised by a codebook, which follows them; buffers of both stages are assigned, also each other.

    A tensor that is no buffer is added to in place.
    """

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.layers[1], self.layers[3]):
            layer.register_buffer("codes", torch.randn(5, 8))
            layer.register_buffer("before", torch.zeros(5, 8))
            layer.register_buffer("steps", torch.tensor(0))
            layer.total = torch.zeros(())

    def after(self, number: int, x: Tensor) -> Tensor:
        layer: Any = self.layers[number]
        if number % 2 == 0:
            return x
        chosen = torch.cdist(x, layer.codes).argmin(-1)
        quantised = layer.codes[chosen] + 0.1 * layer.before[chosen]
        near = nn.functional.one_hot(chosen, 5).to(x.dtype)
        codes = layer.codes
        layer.codes, layer.before = 0.9 * layer.before + 0.1 * near.T @ x.detach(), codes
        layer.steps += 1
        layer.total += x.detach().mean()
        return x + (quantised - x).detach() + codes.mean() + layer.codes.mean()


class Tables(Chain):
    """Tables that are made in the first forward: of a buffer, a part after another, and in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.size, layer.cosines, layer.masks = 0, None, {}
            layer.register_buffer("frequencies", torch.linspace(1, 2, 4))
            layer.register_buffer("positions", None, persistent=False)

    def after(self, number: int, x: Tensor) -> Tensor:
        layer: Any = self.layers[number]
        if layer.size != x.shape[-1]:
            layer.size = x.shape[-1]
            layer.cosines = torch.outer(torch.arange(2.0), layer.frequencies).cos().flatten()
            table = torch.zeros(layer.size)
            table[0::2] = torch.arange(4.0)
            table[1::2].add_(1)
            layer.register_buffer("positions", table, persistent=False)
        if x.dtype not in layer.masks:
            layer.masks[x.dtype] = torch.ones(layer.size, dtype=x.dtype).cumsum_(0)
        return x * layer.cosines + layer.positions * layer.masks[x.dtype]


class Remembering(Chain):
    """Each forward reads, by `read`, what the one before it has kept."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.state: Tensor | None = None
        self.read = read

    def after(self, number: int, x: Tensor) -> Tensor:
        if number == 2:
            state = self.read(self)
            self.state = x.detach().mean(0)
            return x if state is None else x + state
        return x


MODELS = {each.__name__: each for each in (Losses, Hooked, Pruned, Spectral, Codebook, Tables)}


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _step_alone(model: nn.Module, batch: Mapping[str, Tensor], microbatches: int) -> Tensor:
    """A step of one process, a microbatch after the other."""
    losses = []
    for rows in batch["x"].chunk(microbatches):
        loss = model(rows) / microbatches
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def check_kept(sizes: Mapping[str, int]) -> None:
    """Three steps of each. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for name, build in MODELS.items():
        alone, model = _seeded(build), _seeded(build)  # a hook of a copy would be that of the other model
        part = batch_shard({"x": torch.randn(8, 8).repeat(fxpar.num_batch_shards(mesh), 1)}, mesh)
        stages = ["layers.2"][: mesh.pipe - 1]
        layouts = "search" if "x" in sizes else None
        fxpar.distribute(model, mesh, stages=stages, layouts=layouts, microbatches=MICROBATCHES, example_inputs=part)
        step = torch.compile(model, backend="fxpar", options=ATEN)
        microbatches = MICROBATCHES if build is Codebook else 1  # of others no buffer depends on the batch
        for _ in range(3):
            expected, found = _step_alone(alone, part, microbatches), step(**part)
            found.backward()
            compare(f"{name} on {sizes}", expected, found, alone, model)
        state = model.state_dict()  # with the buffers of this stage
        for path, buffer in alone.named_buffers():
            if path in state and not path.endswith("steps"):
                torch.testing.assert_close(state[path], buffer, msg=lambda text, of=(name, path): f"{of}: {text}")
        if build is Codebook:
            counts = [buffer for path, buffer in model.named_buffers() if path.endswith("steps") and path in state]
            assert counts and all(count == 3 for count in counts), "of steps, and not of microbatches"
            totals = [(alone.layers[at].total, model.layers[at].total) for at in (1, 3)]  # of the layer of this stage
            assert sum(bool(total.isclose(expected)) for expected, total in totals) == 2 // mesh.pipe, name
        if build is Tables:
            for mine, theirs in zip(model.layers, alone.layers, strict=True):  # on all ranks, of whichever stage
                torch.testing.assert_close(
                    [mine.cosines, mine.positions, *mine.masks.values()],
                    [theirs.cosines, theirs.positions, *theirs.masks.values()],
                )


@pytest.mark.parametrize("sizes", [{"x": 2}, {"pipe": 2}, {"z": 2}], ids=str)
def test_a_forward_that_keeps_tensors_on_modules_equals_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_kept, sizes)


def is_tensor(model: Any) -> Any:
    return model.state if isinstance(model.state, Tensor) else None


def first_if_there(model: Any) -> Any:
    return getattr(model, "state", None)


@pytest.mark.parametrize("read", [first_if_there, is_tensor])
def test_a_forward_that_reads_what_the_one_before_it_kept_is_an_error(
    read: Callable[[Any], Any], mesh: fxpar.Mesh
) -> None:
    x = torch.randn(4, 8)
    model = fxpar.distribute(Remembering(read), mesh, example_inputs=(x,))
    step = torch.compile(model, backend="fxpar", options=ATEN)
    step(x).backward()
    with pytest.raises(UnavailableTensorError, match=r"test_kept_tensors.py.*the next forward .* registered buffer"):
        step(x)


def test_a_tensor_that_is_read_and_replaced_is_an_error_before_the_first_step(mesh: fxpar.Mesh) -> None:
    model = Remembering(is_tensor)
    model.state = torch.zeros(8)
    with pytest.raises(UnavailableTensorError, match=r"test_kept_tensors.py.*registered buffer"):
        fxpar.distribute(model, mesh, example_inputs=(torch.randn(4, 8),))
    assert torch.equal(model.state, torch.zeros(8))


class Returning(Chain):
    """Returns what a buffer had, and what it has now."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        before = self.mean
        loss = super().forward(x)
        self.mean = 0.9 * self.mean + loss.detach()
        return {"loss": loss, "before": before, "now": self.mean}


def test_a_buffer_is_returned_as_it_was_when_the_forward_read_it(mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone = Returning()
    model, x = copy.deepcopy(alone), torch.randn(4, 8)
    step = torch.compile(fxpar.distribute(model, mesh, example_inputs=(x,)), backend="fxpar", options=ATEN)
    for _ in range(3):
        torch.testing.assert_close(_values(step(x)), _values(alone(x)))


def _values(results: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in results.items()}
