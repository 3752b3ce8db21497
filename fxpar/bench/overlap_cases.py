"""Models on emulated hosts whose step is about half communication, and how its parts are hidden one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar.bench.claims import Claim
from fxpar.bench.models import GPT_HINTS, example
from fxpar.bench.overlap_peers import data_parallel_step, fully_sharded_step
from fxpar.bench.silence import silenced
from fxpar.bench.turns import Step
from fxpar.hints import Spec
from fxpar.mesh import Mesh

NO_OVERLAP, ALL_OVERLAPS, KEPT_WEIGHTS = "no overlap", "and all-gathers", "and kept weights"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    NO_OVERLAP: {"overlap": ()},
    "input gradients": {"overlap": ("input_gradients",)},
    "and reduce-scatters": {"overlap": ("input_gradients", "reduce_scatters")},
    ALL_OVERLAPS: {"overlap": True},
}
"""Options, each variant with one rule of overlap more."""

WITH_RECOMPUTATION: Mapping[str, Mapping[str, Any]] = {
    **{name: {"remat": "full", "gathered_bytes": 0, **options} for name, options in VARIANTS.items()},
    KEPT_WEIGHTS: {"remat": "full"},
}
"""Where layers are computed again in the backward: their weights are gathered again, or kept at last."""

COMPUTE_ALONE = "computation alone"
"""All variants' graphs without their communication, whose results are therefore wrong."""

PEERS = {"DDP": data_parallel_step, "FSDP2": fully_sharded_step}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on four hosts of one rank each.

    Args:
        build: the model, the same on every rank, whose forward gives a loss.
        batch: arguments of a step for one of so many batch shards.
        x, z: sizes of the mesh.
        hints: layouts of its weights over x.
        against: which peers run it, too.
        variants: options by name.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    claims: tuple[Claim, ...]
    x: int = 1
    z: int = 1
    hints: Mapping[str, Spec] = field(default_factory=dict)
    against: tuple[str, ...] = ()
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: VARIANTS)

    def steps(self) -> dict[str, Step]:
        """Every variant's step, and those of the peers, on this of all ranks."""
        mesh = fxpar.init_mesh(x=self.x, z=self.z)
        batch = self.batch(fxpar.num_batch_shards(mesh))
        found: dict[str, Step] = {name: PEERS[name](self.build(), batch) for name in self.against}
        model = self._distributed(mesh, batch)
        for name, options in self.variants.items():
            found[name] = _step(model, batch, options)
        silent = self._distributed(silenced(mesh), batch)
        found[COMPUTE_ALONE] = _step(silent, batch, self.variants[NO_OVERLAP])
        return found

    def _distributed(self, mesh: Mesh, batch: dict[str, Tensor]) -> nn.Module:
        model = self.build()
        fxpar.distribute(model, mesh, layouts=self.hints, example_inputs=batch)
        return model


def _step(model: nn.Module, batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> Step:
    # What is fused overlaps with nothing else, and so no rule applies to it.
    compiled = torch.compile(model, backend="fxpar", options={"lowering": "aten", "fuse": False, **options})

    def step() -> None:
        model.zero_grad()
        compiled(**batch).backward()

    return step


class Chain(nn.Module):
    """Square matrices with a ReLU between them; the loss is the mean square of what comes out."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of rows `x`."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def chain(layers: int, width: int) -> nn.Module:
    """A chain of so many matrices, the same on every rank."""
    torch.manual_seed(0)
    return Chain(layers, width)


def rows(count: int, width: int, parts: int) -> dict[str, Tensor]:
    """One of `parts` parts of a batch of so many rows for a chain."""
    torch.manual_seed(1)
    return {"x": torch.randn(count // parts, width)}


def _gpt(config: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    gpt = example("gpt")
    model: nn.Module = gpt.GPT(gpt.Config(**config))
    return model


def _tokens(config: Mapping[str, Any], size: int, parts: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(config["vocabulary"], (size // parts, config["context"] + 1))
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


# Columns, then rows: a product of either is followed by one reduction.
_ALTERNATING = {f"layers.{layer}.weight": ("x", None) if layer % 2 == 0 else (None, "x") for layer in range(6)}
_SIZES: Mapping[str, Any] = {"vocabulary": 256, "context": 128, "layers": 4, "heads": 4, "hidden": 256}

CHAIN_Z4 = Case(
    "chain, z=4",
    partial(chain, 6, 640),
    partial(rows, 6144, 640),
    z=4,
    claims=(
        Claim(ALL_OVERLAPS, NO_OVERLAP, 1.34),
        Claim(ALL_OVERLAPS, "FSDP2", 1.5),
        Claim(ALL_OVERLAPS, "DDP", 1.1),
    ),
    against=("DDP", "FSDP2"),
)
CHAIN_X2_Z2 = Case(
    "chain, x=2, z=2",
    partial(chain, 6, 640),
    partial(rows, 2048, 640),
    x=2,
    z=2,
    claims=(Claim(ALL_OVERLAPS, NO_OVERLAP, 1.15),),
    hints=_ALTERNATING,
)
GPT_Z4 = Case(
    "GPT, z=4",
    partial(_gpt, _SIZES),
    partial(_tokens, _SIZES, 32),
    z=4,
    claims=(Claim(ALL_OVERLAPS, NO_OVERLAP, 1.34),),
)
GPT_X2_Z2 = Case(
    "GPT, x=2, z=2",
    partial(_gpt, _SIZES),
    partial(_tokens, _SIZES, 16),
    x=2,
    z=2,
    claims=(Claim(ALL_OVERLAPS, NO_OVERLAP, 1.15),),
    hints=GPT_HINTS,
)
GPT_X2_Z2_AGAIN = replace(
    GPT_X2_Z2,
    name="GPT, x=2, z=2, layers computed again",
    claims=(Claim(KEPT_WEIGHTS, NO_OVERLAP, 1.25),),
    variants=WITH_RECOMPUTATION,
)
CASES = (CHAIN_Z4, CHAIN_X2_Z2, GPT_Z4, GPT_X2_Z2, GPT_X2_Z2_AGAIN)
