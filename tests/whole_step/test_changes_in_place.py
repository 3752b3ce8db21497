"""What a forward changes in place, itself or through a view: buffers, arguments, and parameters that it reads later."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import UnsupportedGraphError
from fxpar.world.launch import run_ranks
from tests.support.fake_mesh import fake_mesh
from tests.support.parity import batch_shard, compare

WIDTH, ROWS, STEPS = 8, 8, 3


def _swap_halves(buffer: Tensor) -> None:
    first, second = buffer.chunk(2)
    first.add_(second, alpha=-0.1)


def _twice(buffer: Tensor) -> None:
    view = buffer[2:]
    view.mul_(0.5)
    view[1:].add_(0.1)


@torch.library.custom_op("fxpar_tests::damp", mutates_args={"buffer"})
def damp(factor: Tensor, buffer: Tensor) -> None:
    """Changes its second argument."""
    buffer.mul_(factor)


def _statistics(buffer: Tensor) -> None:
    rows = torch.linspace(0, 1, WIDTH).view(2, -1)
    functional.batch_norm(rows, buffer[: WIDTH // 2], buffer[WIDTH // 2 :], training=True)


BUFFER_CHANGES: Mapping[str, Callable[[Tensor], Any]] = {
    "itself": lambda buffer: buffer.mul_(0.5),
    "slice": lambda buffer: buffer[2:5].mul_(0.5),
    "data": lambda buffer: buffer.data.mul_(0.5).add_(0.1),
    "detached": lambda buffer: buffer.detach().mul_(0.5).add_(0.1),
    "reshaped": lambda buffer: buffer.view(2, 4)[1].mul_(0.5),
    "item": lambda buffer: buffer.unbind(0)[2].zero_(),
    "copied": lambda buffer: buffer[:4].copy_(buffer[4:] * 0.9),
    "halves": _swap_halves,
    "twice": _twice,
    "several": lambda buffer: torch._foreach_mul_([buffer[:2], buffer[4:]], 0.5),
    "by a method": lambda buffer: buffer.__imul__(0.5),
    "into": lambda buffer: torch.mul(buffer, 0.5, out=buffer),
    "into two": lambda buffer: torch.frexp(buffer[:3] * 2, out=(buffer[3:6], torch.zeros(3, dtype=torch.int32))),
    "by an op": lambda buffer: damp(torch.full((), 0.5), buffer),
    "by its name": lambda buffer: torch.ops.fxpar_tests.damp(torch.full((), 0.5), buffer[1:]),
    "statistics": _statistics,
}


def _half_of_the_first(block: Block) -> None:
    with torch.no_grad():
        block.first.weight.mul_(0.5)
        block.last.weight.copy_(block.last.weight.clamp(-0.1, 0.1))


def _without_grad(block: Block) -> None:
    weight = block.last.weight
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)
        weight.masked_fill_(weight.abs() < 0.01, 0.05)


def _rows_of_norm_one(block: Block) -> None:
    with torch.no_grad():
        block.first.weight.copy_(nn.functional.normalize(block.first.weight, dim=1))
        block.last.weight.sub_(block.last.weight.mean(0)).div_(block.first.weight.norm())


def _first_row(block: Block) -> None:
    block.last.weight.data[0].zero_()


PARAMETER_CHANGES: Mapping[str, Callable[[Block], Any]] = {
    "data": lambda block: block.last.weight.data.clamp_(-0.1, 0.1),
    "detached": lambda block: block.last.weight.detach().mul_(0.9).add_(0.1),
    "several": _half_of_the_first,
    "without grad": _without_grad,
    "rows": _rows_of_norm_one,
    "first row": _first_row,
}


class Block(nn.Module):
    """A residual block, scaled by a buffer, that changes something of its own first."""

    def __init__(self, change: Callable[[Block], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return x + self.last((self.first(x) * self.scale).relu()) / 4


class Chain(nn.Module):
    """Two equal blocks of each kind: the second is a copy of the first one's trace."""

    def __init__(self, changes: Mapping[str, Callable[[Block], Any]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"{name} {i}": Block(change) for name, change in changes.items() for i in (1, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x.square().mean()


def of_buffers() -> Chain:
    changes = BUFFER_CHANGES.items()
    return Chain({name: lambda block, change=change: change(block.scale) for name, change in changes})


def of_parameters() -> Chain:
    return Chain(PARAMETER_CHANGES)


def train(build: Callable[[], Chain], sizes: Mapping[str, int], microbatches: int, options: dict[str, Any]) -> None:
    """Train on a mesh and on one process, and compare losses, gradients, parameters and buffers. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone = build()
    model = copy.deepcopy(alone)
    batches = torch.randn(STEPS, ROWS, WIDTH)
    example = batch_shard({"x": batches[0]}, mesh)
    fxpar.distribute(model, mesh, microbatches=microbatches, example_inputs=example)
    step = torch.compile(model, backend="fxpar", options=options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for batch in batches:
        expected, found = alone(batch), step(**batch_shard({"x": batch}, mesh))
        expected.backward()
        found.backward()
        compare(f"on {mesh}", expected, found, alone, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found_state = fxpar.whole_state_dict(model)
    if mesh.rank == 0:
        torch.testing.assert_close(found_state, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [{}, {"pipe": 2}], ids=str)
def test_buffers_are_changed_through_any_view(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), train, of_buffers, sizes, 1, {"lowering": "aten"})


MESHES: list[dict[str, int]] = [{"pipe": 2}, {"x": 2}, {"z": 2}, {"pipe": 2, "x": 2}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_parameters_are_changed_once_per_step(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), train, of_parameters, sizes, 2, {"lowering": "aten"})


def test_parameters_are_changed_by_compiled_steps() -> None:
    run_ranks(2, train, of_parameters, {"pipe": 2}, 2, {})


def _fill_the_first_kind(x: Tensor, kinds: Tensor) -> None:
    x[kinds == 0] = 0.25


def _rename_the_last_kind(_: Tensor, kinds: Tensor) -> None:
    kinds[kinds == 2] = 1


ARGUMENT_CHANGES: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": lambda x, kinds: x.mul_(0.5),
    "column": lambda x, kinds: x[:, 1].zero_(),
    "data": lambda x, kinds: x.data.add_(0.1),
    "transposed": lambda x, kinds: x.t()[2].mul_(0.5),
    "selected": _fill_the_first_kind,
    "by another": lambda x, kinds: x[:, 3:].mul_(kinds[:, None] + 0.5),
    "another": _rename_the_last_kind,
    "joined": lambda x, kinds: x[:, :4].copy_(x[:, 4:] + x[:, :1]),
}


class Changing(nn.Module):
    """Reads its arguments, changes them, and reads them again in its last block."""

    def __init__(self, changes: Iterable[Callable[[Tensor, Tensor], Any]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(lambda _: None) for _ in range(3)])
        self.changes = list(changes)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        before, was_first = x.sum(1, keepdim=True), (kinds == 0)[:, None]
        for change in self.changes:
            change(x, kinds)
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden * before + x * was_first).square().mean() + (x[:, 0] * kinds).mean()


def train_on_changed(sizes: Mapping[str, int], microbatches: int, options: dict[str, Any]) -> None:
    """Compare losses, gradients, and what the arguments become, with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone = Changing(ARGUMENT_CHANGES.values())
    model = copy.deepcopy(alone)
    whole = {"x": torch.randn(ROWS, WIDTH), "kinds": torch.arange(ROWS) % 3}
    part = {name: value.clone() for name, value in batch_shard(whole, mesh).items()}
    fxpar.distribute(model, mesh, microbatches=microbatches, example_inputs=part)
    step = torch.compile(model, backend="fxpar", options=options)
    for _ in range(2):  # the second step gets what the first has left
        expected, found = alone(**whole), step(**part)
        expected.backward()
        found.backward()
        compare(f"on {mesh}", expected, found, alone, model)
        torch.testing.assert_close(part, batch_shard(whole, mesh))


@pytest.mark.parametrize("sizes", [{}, {"z": 2}, *MESHES[:2]], ids=str)
def test_arguments_are_changed_as_the_caller_sees(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), train_on_changed, sizes, 2, {"lowering": "aten"})


def test_arguments_are_changed_by_compiled_steps() -> None:
    run_ranks(2, train_on_changed, {"pipe": 2}, 2, {})


def test_arguments_that_become_random_are_an_error() -> None:
    arguments = (torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 3)
    expected = r"test_changes_in_place.py.*changes an argument of the forward in place, .*x = x.clone\(\)"
    with fake_mesh() as mesh, pytest.raises(UnsupportedGraphError, match=expected):
        fxpar.distribute(Changing([lambda x, kinds: x.mul_(torch.rand_like(x))]), mesh, example_inputs=arguments)


def _read_before(block: Block) -> Tensor:
    norm = block.last.weight.square().sum()
    block.last.weight.data.clamp_(-0.1, 0.1)
    block.scale = block.scale * norm.detach()
    return norm


def _by_chance(block: Block) -> None:
    block.last.weight.data.mul_(torch.rand_like(block.last.weight))


def _by_a_buffer(block: Block) -> None:
    block.last.weight.data.mul_(block.scale)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_read_before, "has read it before"),
        (_by_chance, "its new value depends on more than parameters"),
        (_by_a_buffer, "its new value depends on more than parameters"),
    ],
)
def test_what_a_shard_cannot_change_alone_before_the_step_is_an_error(
    change: Callable[[Block], Any], reason: str
) -> None:
    expected = rf"test_changes_in_place.py.*last.weight in place, and .*{reason}"
    with fake_mesh() as mesh, pytest.raises(UnsupportedGraphError, match=expected):
        fxpar.distribute(Chain({"first": change}), mesh, example_inputs=(torch.randn(ROWS, WIDTH),))
