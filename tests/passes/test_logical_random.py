"""logical_random: the same numbers on every mesh, different ones for every op, step and microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpar
from fxpar.errors import RandomGeneratorError, UnsupportedGraphError
from fxpar.ir.random import RANDOM_STATE, random_state
from fxpar.ir.stage import JointGraph
from fxpar.passes.logical_random import logical_random
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from fxpar.world.launch import run_ranks
from tests.support.captures import captured


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.scale = draw, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = self.draw(x)
        return (drawn * self.scale).sum(), drawn


def redrawn(draw: Callable[[Tensor], Tensor], x: Tensor) -> JointGraph:
    capture, _ = captured(Drawing(draw), (x,))
    (stage,) = split_stages(capture, [])
    return logical_random(trace_joint(stage, with_backward=True))


def run(joint: JointGraph, x: Tensor, step: int = 0, chunk: int = 0) -> Tensor:
    values = {"0": x, RANDOM_STATE.name: random_state(7, step, chunk, 1), "scale": torch.ones(())}
    outputs = joint.module(*(values[port.name] for port in joint.inputs), torch.ones(()))
    drawn: Tensor = outputs[1]
    return drawn


DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.25), 1.0, math.sqrt(1 / 3)),
    "rand_like": (torch.rand_like, 0.5, math.sqrt(1 / 12)),
    "rand": (lambda x: torch.rand(x.shape), 0.5, math.sqrt(1 / 12)),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.2)), 0.2, 0.4),
    "randn, no generator": (lambda x: torch.randn(x.shape, generator=None), 0.0, 1.0),
    "rand, no generator": (lambda x: torch.rand(x.shape, generator=None), 0.5, math.sqrt(1 / 12)),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * math.sqrt(1 / 12)),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 0.5), 2.0, 0.5),
    "normal": (lambda x: torch.normal(x, 2.0), 0.0, 2.0),
    "normal of a size": (lambda x: torch.normal(1.0, 2.0, x.shape), 1.0, 2.0),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "randint": (lambda x: torch.randint(-2, 3, x.shape).float(), 0.0, math.sqrt(2)),
    "randint_like": (lambda x: torch.randint_like(x, 5), 2.0, math.sqrt(2)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_their_distribution_and_differ_between_steps_and_microbatches(name: str) -> None:
    draw, mean, deviation = DRAWS[name]
    x = torch.zeros(100, 100)
    joint = redrawn(draw, x)
    assert joint.inputs[-1] == RANDOM_STATE
    first, again, next_step, next_chunk = (run(joint, x, *at) for at in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, next_step)
    assert not torch.equal(first, next_chunk)
    assert abs(first.mean() - mean) < 0.03 * max(1, deviation)
    assert abs(first.std() - deviation) < 0.03 * max(1, deviation)


def test_two_ops_draw_different_numbers() -> None:
    x = torch.zeros(10, 10)
    drawn = run(redrawn(lambda x: torch.rand_like(x) - torch.rand_like(x), x), x)
    assert drawn.abs().min() > 0


def test_microbatches_draw_what_the_whole_batch_draws() -> None:
    whole = run(redrawn(torch.rand_like, torch.zeros(4, 6)), torch.zeros(4, 6))
    half = redrawn(torch.rand_like, torch.zeros(2, 6))
    torch.testing.assert_close(torch.cat([run(half, torch.zeros(2, 6), chunk=c) for c in (0, 1)]), whole)


def test_graphs_without_random_ops_stay_as_they_are() -> None:
    joint = redrawn(lambda x: x * 2, torch.zeros(2, 2))
    assert RANDOM_STATE not in joint.inputs


def test_integers_are_all_drawn_and_no_others() -> None:
    joint = redrawn(lambda x: torch.randint(-2, 3, x.shape).float(), torch.zeros(100, 100))
    assert run(joint, torch.zeros(100, 100)).unique().tolist() == [-2, -1, 0, 1, 2]
    with pytest.raises(UnsupportedGraphError, match=r"draws from 20000000 integers: expected at most 16777216"):
        redrawn(lambda x: torch.randint(20_000_000, x.shape).float(), torch.zeros(3, 4))


def test_another_distribution_is_an_error_that_says_where_and_what_instead() -> None:
    message = r"multinomial.* in the root module \(File .*test_logical_random.py.*not the same on every mesh"
    with pytest.raises(UnsupportedGraphError, match=message):
        redrawn(lambda x: torch.multinomial(x.abs() + 1, 2).to(x.dtype), torch.rand(3, 4))


def test_a_generator_is_an_error_that_says_where_and_what_instead() -> None:
    generator = torch.Generator()
    with pytest.raises(RandomGeneratorError, match=r"at .*test_logical_random.py:\d+ .*expected generator=None"):
        redrawn(lambda x: torch.randn(x.shape, generator=generator), torch.rand(3, 4))


class Dropped(nn.Module):
    """Dropout on a sharded hidden value, in another stage, and at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)
        self.last = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.middle(torch.relu(self.up(x))))
        return F.dropout(self.last(h), 0.2).square().mean()


def losses_on(sizes: Mapping[str, int], microbatches: int, device_type: str | None = None) -> list[float]:
    torch.manual_seed(5)
    mesh = fxpar.init_mesh(**sizes, device_type=device_type)
    model, x = Dropped(), torch.randn(8, 8).to(mesh.device_type)
    mine = x.chunk(mesh.data)[fxpar.batch_rank(mesh)]
    hints = {"up.weight": ("x", None), "down.weight": (None, "x")}
    stages = ["last"] if mesh.pipe == 2 else []
    fxpar.distribute(model, mesh, stages=stages, layouts=hints, microbatches=microbatches, example_inputs=(mine,))
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    return [step(mine).item() for _ in range(2)]


def test_a_model_with_dropout_trains_alike_on_every_mesh() -> None:
    (expected,) = run_ranks(1, losses_on, {}, 1)
    assert expected[0] != expected[1]
    for sizes, microbatches in (({}, 4), ({"x": 2}, 2), ({"data": 2}, 1), ({"pipe": 2}, 2)):
        for found in run_ranks(math.prod(sizes.values()), losses_on, sizes, microbatches):
            assert found == pytest.approx(expected, rel=1e-5), (sizes, microbatches)
