"""Models on emulated hosts whose step is about half communication, with rules of overlap that are added one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxpar
from fxpar._torch.distributed import have_fake_process_groups
from fxpar.bench.measure.claims import Claim
from fxpar.bench.measure.interleaved import Step
from fxpar.bench.models import GPT_HINTS, example
from fxpar.bench.overlap.peers import DDP, FSDP2, data_parallel_steps, fully_sharded_steps
from fxpar.ir.hints import Spec
from fxpar.world.mesh import Mesh

NO_OVERLAP, ALL_OVERLAPS, KEPT_WEIGHTS = "no overlap", "and all-gathers", "and kept weights"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    NO_OVERLAP: {"overlap": ()},
    "input gradients": {"overlap": ("input_gradients",)},
    "and reduce-scatters": {"overlap": ("input_gradients", "reduce_scatters")},
    ALL_OVERLAPS: {"overlap": True},
}
"""Options by variant; each variant has one more rule of overlap."""

WITH_RECOMPUTATION: Mapping[str, Mapping[str, Any]] = {
    **{name: {"remat": "full", "gathered_bytes": 0, **options} for name, options in VARIANTS.items()},
    KEPT_WEIGHTS: {"remat": "full"},
}
"""Options by variant if layers are recomputed in the backward: weights are gathered again, or kept in the last one."""

COMPUTE_ALONE = "computation alone"
"""The graphs of the variant without overlap, with collectives that do nothing; so its results are wrong."""


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """A model on four hosts of one rank each.

    Args:
        build: the model, the same on every rank, whose forward returns a loss.
        batch: maps the number of batch shards to the arguments of a step on one of them.
        x, z: sizes of the mesh.
        hints: layouts of its weights over x.
        layers: the module whose children FSDP2 gathers one at a time, where the case also runs DDP and FSDP2.
        variants: options by name.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    claims: tuple[Claim, ...]
    x: int = 1
    z: int = 1
    hints: Mapping[str, Spec] = field(default_factory=dict)
    layers: str | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: VARIANTS)

    def steps(self) -> dict[str, Step]:
        """The steps of all variants and peers, on this rank."""
        mesh = fxpar.init_mesh(x=self.x, z=self.z)
        batch = self.batch(fxpar.num_batch_shards(mesh))
        found: dict[str, Step] = {}
        if self.layers is not None:
            found |= data_parallel_steps(self.build, batch)
            found |= fully_sharded_steps(self.build, batch, self.layers)
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
    # No rule of overlap applies to a fused op.
    compiled = torch.compile(model, backend="fxpar", options={"lowering": "aten", "fuse": False, **options})

    def step() -> None:
        model.zero_grad()
        compiled(**batch).backward()

    return step


class Chain(nn.Module):
    """Linear layers of equal width, each followed by a ReLU; the loss is the mean square of the output."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of rows `x`."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def chain(layers: int, width: int) -> nn.Module:
    """A chain of that many layers, the same on every rank."""
    torch.manual_seed(0)
    return Chain(layers, width)


def rows(count: int, width: int, parts: int) -> dict[str, Tensor]:
    """One of `parts` parts of a batch of `count` rows for a chain."""
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


# Output features, then input features: so two layers need one reduction in the forward and one in the backward.
_ALTERNATING = {f"layers.{layer}.weight": ("x", None) if layer % 2 == 0 else (None, "x") for layer in range(6)}

# Six layers: enough for a gather one layer ahead, and so that the first and last, which hide nothing, are only a third.
# 640 columns: at half a second of computing per step, a weight (1.6 MB) takes 16 times the latency of a collective of
# gloo between four ranks (5 ms), so that what is measured is bandwidth.
_LAYERS, _WIDTH = 6, 640
# A step of that many rows on four ranks of two cores computes for half a second: links that take as long have some
# 300 Mbit/s, which the emulation holds within 5%. With faster links, TCP itself would take the processors.
_ROWS_Z4 = 6144
# With x=2 a rank has half of each weight: two batch shards have a third as many rows, as activations are reduced, too.
_ROWS_X2_Z2 = 2048

# The example's GPT with the hidden size of 256 at which a step on two cores takes below a second, as many layers as
# ranks, and a vocabulary of bytes, so that its embedding is no larger than a layer.
_SIZES: Mapping[str, Any] = {"vocabulary": 256, "context": 128, "layers": 4, "heads": 4, "hidden": 256}
# Eight sequences per batch shard: computing takes as long as communicating over links that can be emulated (above).
_SEQUENCES_Z4, _SEQUENCES_X2_Z2 = 32, 16

# The speed-up by overlap: if communication is half of a step, hiding all of it would make the step twice as fast; the
# reduction of the last gradient and the gather of the first weight have nothing to hide behind, and four ranks share
# two cores. With x, reductions of activations in the forward stay exposed: 1.15. Kept weights save a third of all
# gathers as well: 1.25.
_GAIN_OF_Z, _GAIN_OF_X_AND_Z, _GAIN_OF_KEPT = 1.34, 1.15, 1.25
# fxpar stores a quarter of what DDP does, and sends as much: the goal is to be no slower than DDP at its best buckets.
_OVER_DDP = 1.0
# FSDP2 does not overlap gloo's collectives with the computation: with weights kept it sends as much as fxpar does, and
# hides none of it.
_OVER_FSDP2 = 1.3

_AGAINST_PEERS = (Claim(ALL_OVERLAPS, FSDP2, _OVER_FSDP2), Claim(ALL_OVERLAPS, DDP, _OVER_DDP))

CHAIN_Z4 = OverlapCase(
    "chain, z=4",
    partial(chain, _LAYERS, _WIDTH),
    partial(rows, _ROWS_Z4, _WIDTH),
    z=4,
    claims=(Claim(ALL_OVERLAPS, NO_OVERLAP, _GAIN_OF_Z), *_AGAINST_PEERS),
    layers="layers",
)
CHAIN_X2_Z2 = OverlapCase(
    "chain, x=2, z=2",
    partial(chain, _LAYERS, _WIDTH),
    partial(rows, _ROWS_X2_Z2, _WIDTH),
    x=2,
    z=2,
    claims=(Claim(ALL_OVERLAPS, NO_OVERLAP, _GAIN_OF_X_AND_Z),),
    hints=_ALTERNATING,
)
GPT_Z4 = OverlapCase(
    "GPT, z=4",
    partial(_gpt, _SIZES),
    partial(_tokens, _SIZES, _SEQUENCES_Z4),
    z=4,
    claims=(Claim(ALL_OVERLAPS, NO_OVERLAP, _GAIN_OF_Z), *_AGAINST_PEERS),
    layers="blocks",
)
GPT_X2_Z2 = OverlapCase(
    "GPT, x=2, z=2",
    partial(_gpt, _SIZES),
    partial(_tokens, _SIZES, _SEQUENCES_X2_Z2),
    x=2,
    z=2,
    claims=(Claim(ALL_OVERLAPS, NO_OVERLAP, _GAIN_OF_X_AND_Z),),
    hints=GPT_HINTS,
)
GPT_X2_Z2_AGAIN = replace(
    GPT_X2_Z2,
    name="GPT, x=2, z=2, layers computed again",
    claims=(Claim(KEPT_WEIGHTS, NO_OVERLAP, _GAIN_OF_KEPT),),
    variants=WITH_RECOMPUTATION,
)
CASES = (CHAIN_Z4, CHAIN_X2_Z2, GPT_Z4, GPT_X2_Z2, GPT_X2_Z2_AGAIN)


def silenced(mesh: Mesh) -> Mesh:
    """`mesh` with fake groups: their collectives leave memory unchanged. A collective of all ranks."""
    assert mesh.device_mesh is not None and mesh.device_mesh.mesh_dim_names is not None, (
        "the mesh was made without ranks"
    )
    names = mesh.device_mesh.mesh_dim_names
    backends = (("fake", None),) * len(names)
    have_fake_process_groups()
    ranks = mesh.device_mesh.mesh
    return replace(mesh, device_mesh=DeviceMesh("cpu", ranks, mesh_dim_names=names, backend_override=backends))
