"""Stages begin where the slowest has least to do."""

from __future__ import annotations

from itertools import combinations
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fxpar.costs.prices import prices_of
from fxpar.errors import InvalidStagesError
from fxpar.passes.stages import balance_stages as module
from fxpar.passes.stages.balance_stages import balance_stages
from tests.support.captures import captured

HEIGHT, NARROW, WIDE = 16, 32, 512


class Chain(nn.Module):
    """Matrices, one module each; a wide one costs sixteen times what a narrow one does, and more."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        sizes = (NARROW, *widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(sizes, widths, strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "widths",
    [
        (NARROW, NARROW, NARROW, WIDE),
        (WIDE, NARROW, NARROW, NARROW),
        (NARROW, WIDE, WIDE, NARROW, NARROW),
        (NARROW,) * 6,
    ],
)
def test_the_slowest_stage_has_as_little_to_do_as_it_can(widths: tuple[int, ...], num_stages: int) -> None:
    capture, distribution = captured(Chain(widths), (torch.randn(HEIGHT, NARROW),))
    prices = prices_of(distribution.mesh)
    sizes = (NARROW, *widths)
    flops = [2 * HEIGHT * a * b for a, b in zip(sizes, widths, strict=False)]
    times = [
        prices.arithmetic_us(each, torch.float32) + 2 * 4 * HEIGHT * width / prices.memory_bytes_per_us
        for each, width in zip(flops, widths, strict=True)
    ]

    def slowest(cuts: tuple[int, ...]) -> float:
        starts = (0, *cuts)
        entering = [4 * HEIGHT * sizes[start] / prices.edge_bytes_per_us if start else 0.0 for start in starts]
        ends = (*cuts, len(widths))
        return max(sum(times[a:b]) + more for a, b, more in zip(starts, ends, entering, strict=True))

    chosen = tuple(int(path.removeprefix("layers.")) for path in balance_stages(capture, num_stages, prices))
    best = min(slowest(cuts) for cuts in combinations(range(1, len(widths)), num_stages - 1))
    assert slowest(chosen) == pytest.approx(best)


def test_equal_ops_are_run_once() -> None:
    for count in (4, 16):
        capture, distribution = captured(Chain((NARROW,) * count), (torch.randn(HEIGHT, NARROW),))
        with patch.object(module, "_run", side_effect=module._run) as run:
            balance_stages(capture, 2, prices_of(distribution.mesh))
        assert run.call_count == 1


class Mapped(nn.Module):
    """Three layers, of which the middle one, and the two modules in it, run on one sample at a time by `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NARROW, NARROW), nn.Linear(NARROW, NARROW)
        self.middle = nn.Sequential(nn.Linear(NARROW, NARROW), nn.Linear(NARROW, NARROW))

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(lambda row: self.middle(row) * row)(self.first(x))
        return self.last(mapped)


def test_no_stage_begins_amid_a_transform() -> None:
    capture, distribution = captured(Mapped(), (torch.randn(HEIGHT, NARROW),))
    assert balance_stages(capture, 2, prices_of(distribution.mesh)) == ("last",)
    with pytest.raises(InvalidStagesError, match="through 1 modules"):
        balance_stages(capture, 3, prices_of(distribution.mesh))


def test_of_equally_good_cuts_the_first_are_taken() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert module._split(times, dict.fromkeys(range(1, 5), 0.0), 3) == (1, 3)
    assert module._split(times, {1: 0.0, 2: 5.0, 3: 0.0, 4: 0.0}, 3) == (1, 3)
