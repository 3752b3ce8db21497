"""The list of what limits a step names a planted mistake first, with its figures and its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from fxpar.analysis.dumped_step import DumpedStep, read_dump
from fxpar.analysis.limits.find_limits import find_limits
from fxpar.analysis.predicted_parts import predicted_parts
from fxpar.errors import OpsWithoutRuleWarning
from fxpar.hardware.cluster import Cluster, cluster_named
from fxpar.ir.hints import Spec
from tests.support.imagined_dump import Imagined, dump_imagined

WIDTH, ROWS, LAYERS = 4096, 4096, 4
CLUSTER = replace(cluster_named("dgx-a100"), ranks_per_host=4)
ETHERNET = replace(CLUSTER, interface_bytes_per_us=1250.0, interfaces_per_host=1)
"""Hosts with one interface of 10 Gbit/s."""

SPLIT: Mapping[str, Spec] = {"layers.*.up.weight": ("x", None), "layers.*.down.weight": (None, "x")}


@torch.library.custom_op("fxpar_tests::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor) -> Tensor:
    """A matrix product that fxpar has no rule for."""
    return x @ weight


mix.register_fake(lambda x, weight: x @ weight)
mix.register_autograd(
    lambda ctx, gradient: (mix(gradient, ctx.saved_tensors[1].t()), mix(ctx.saved_tensors[0].t(), gradient)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@register_flop_formula(torch.ops.fxpar_tests.mix)
def mix_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


class Layer(nn.Module):
    """An MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixer(nn.Module):
    """As much work as half a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return mix(x, self.weight)


class Stack(nn.Module):
    """Layers, perhaps with mixers between them."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.mixers = nn.ModuleList(Mixer() if mixes else nn.Identity() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer, mixer in zip(self.layers, self.mixers, strict=True):
            x = mixer(layer(x))
        return x.mean()


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration of the model."""

    sizes: Mapping[str, int]
    microbatches: int = 1
    mixes: bool = False
    cluster: Cluster = CLUSTER
    layouts: Mapping[str, Spec] = field(default_factory=lambda: SPLIT)


CASES = {
    "few microbatches": Case({"pipe": 4}, 2, layouts={}),
    "more microbatches": Case({"pipe": 4}, 8, layouts={}),
    "x between hosts": Case({"x": 8}, 8, cluster=ETHERNET),
    "x inside hosts": Case({"pipe": 2, "x": 4}, 8, cluster=ETHERNET),
    "an op without rule": Case({"x": 4}, mixes=True),
    "no such op": Case({"x": 4}),
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DumpedStep]:
    with pytest.warns(OpsWithoutRuleWarning):
        return {name: _step(case, tmp_path_factory.mktemp("dump")) for name, case in CASES.items()}


def _step(case: Case, folder: Path) -> DumpedStep:
    with torch.device("meta"):
        model, rows = Stack(mixes=case.mixes), torch.zeros(ROWS * case.microbatches, WIDTH)
    how = Imagined(case.sizes, case.cluster, case.microbatches, "1f1b", case.layouts)
    dump_imagined(model, (rows,), how, folder)
    return read_dump(folder)


def test_too_few_microbatches_are_named_with_what_more_would_bring(steps: dict[str, DumpedStep]) -> None:
    first = find_limits(steps["few microbatches"])[0]
    assert (first.kind, first.title) == ("bubble", "Pipeline bubble")
    assert first.share == pytest.approx(1 - 2 / 5, abs=0.01), "2 microbatches take as long as 2 + 3 do"
    assert "1f1b runs 2 microbatches on 4 pipe ranks" in first.finding
    left = predicted_parts(steps["more microbatches"])
    assert left.share(left.bubble_us) == pytest.approx(1 - 8 / 11, abs=0.02)
    assert f"8 would leave a bubble of {left.share(left.bubble_us):.0%}" in first.advice


def test_tensor_parallelism_over_the_slow_link_is_named_with_the_link(steps: dict[str, DumpedStep]) -> None:
    badly, well = steps["x between hosts"], steps["x inside hosts"]
    first = find_limits(badly)[0]
    assert (first.kind, first.title) == ("communication", "Exposed communication over x")
    assert first.share > 0.5
    assert "all_reduce" in first.finding
    assert "over x (8 ranks), whose groups span 2 hosts" in first.finding
    assert "the network between hosts has 1.25 GB/s per rank, inside it is 300 GB/s" in first.finding
    assert "Keep tensor parallelism inside hosts, which have 4 ranks" in first.advice
    assert well.step_us < badly.step_us / 2
    assert "Exposed communication over x" not in [limit.title for limit in find_limits(well)]


def test_a_large_replicated_op_is_named_with_its_module_and_its_cost(steps: dict[str, DumpedStep]) -> None:
    badly, well = steps["an op without rule"], steps["no such op"]
    first = find_limits(badly)[0]
    assert (first.kind, first.title) == ("replication", "Replicated work")
    assert "`fxpar_tests.mix` in `mixers.*` (stage 0), which all 4 ranks along x run as a whole" in first.finding
    assert "no sharding rule: give it one by `fxpar.register_rule`" in first.advice
    # A rank of 4 could do with a fourth of it.
    wasted = predicted_parts(badly).replicated_us
    assert wasted == pytest.approx(0.75 * (badly.step_us - well.step_us), rel=0.05)
    assert first.share == pytest.approx(wasted / badly.step_us)
    assert "replication" not in [limit.kind for limit in find_limits(well)]


def test_the_parts_add_up_to_the_step(steps: dict[str, DumpedStep]) -> None:
    for name, step in steps.items():
        parts = predicted_parts(step)
        assert sum(part.time_us for part in parts.parts) == pytest.approx(step.step_us, rel=1e-6), name
        assert all(part.time_us >= 0 for part in parts.parts), name
