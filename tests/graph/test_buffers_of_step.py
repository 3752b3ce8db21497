"""Buffers change once per step if no microbatch has a part in it, as on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.graph.buffers_of_step import buffers_of_step
from tests.support.joint_graphs import joint_graph
from tests.support.one_process import ATEN, mesh_of_one_process

WIDTH, ROWS, STEPS = 4, 8, 3

mesh = pytest.fixture(mesh_of_one_process)


class Buffered(nn.Module):
    """A factor between two matrices that depends on buffers, which `change` changes before."""

    def __init__(self, change: Callable[[Buffered, Tensor], None]) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.change(self, x)
        return (self.last(x) * (1 + self.count / 10) * self.average).square().mean()


def _count(model: Buffered, x: Tensor) -> None:
    model.count += 1


def _by_each_other(model: Buffered, x: Tensor) -> None:
    model.count += model.average.mean()
    model.average.mul_(1 - model.count / 100)


def _by_a_parameter(model: Buffered, x: Tensor) -> None:
    model.average.lerp_(model.last.weight.detach()[0], 0.1)
    model.count.copy_(model.average.sum())


def _by_the_batch(model: Buffered, x: Tensor) -> None:
    model.count += 1
    model.average.lerp_(x.detach().mean(0), 0.1)


def _cumulative(model: Buffered, x: Tensor) -> None:
    model.count += 1
    model.average.lerp_(x.detach().mean(0), 1 / model.count)


def _by_one_of_the_batch(model: Buffered, x: Tensor) -> None:
    model.average.lerp_(x.detach().mean(0), 0.1)
    model.count += model.average.mean()


CHANGES: Mapping[Callable[[Buffered, Tensor], None], set[str]] = {
    _count: {"count"},
    _by_each_other: {"count", "average"},
    _by_a_parameter: {"count", "average"},
    _by_the_batch: {"count"},
    _cumulative: set(),
    _by_one_of_the_batch: set(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_depends_on_no_microbatch_is_of_the_step(change: Callable[[Buffered, Tensor], None]) -> None:
    assert set(buffers_of_step(joint_graph(Buffered(change), torch.randn(ROWS, WIDTH)))) == CHANGES[change]


@pytest.mark.parametrize("change", [change for change, names in CHANGES.items() if len(names) == 2 or change is _count])
def test_they_change_as_on_one_process(change: Callable[[Buffered, Tensor], None], mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    reference = Buffered(change)
    model = Buffered(change)
    model.load_state_dict(reference.state_dict())
    fxpar.distribute(model, mesh, microbatches=4)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH)
        expected = reference(x)
        expected.backward()
        found = step(x)
        found.backward()
        torch.testing.assert_close(found, expected)
    for (name, mine), (_, theirs) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, n=name: f"{n}: {text}")
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), reference.first.weight.grad)
