"""Models of diffusers are listed, made small by the names of their arguments, and train on meshes as on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar.survey.compare import comparable
from fxpar.survey.families import HEADS, Family
from fxpar.survey.heads.head import ROWS, chunk
from fxpar.survey.heads.tiny_arguments import HEAD_SIZE, HIDDEN, tiny_arguments
from fxpar.survey.run import survey


def test_what_diffusers_exports_is_listed() -> None:
    diffusion, autoencoders = set(HEADS["diffusion"].names()), set(HEADS["autoencoder"].names())
    assert {"FluxTransformer2DModel", "UNet2DConditionModel"} <= diffusion
    assert {"AutoencoderKL", "VQModel"} <= autoencoders
    assert "ModelMixin" not in diffusion | autoencoders
    assert not diffusion & autoencoders


def first_arguments(init: Callable[..., Any]) -> dict[str, Any]:
    return next(iter(tiny_arguments(init)))


def test_arguments_are_shrunk_by_their_names() -> None:
    def init(
        self: Any,
        num_layers: int = 30,
        num_attention_heads: int = 24,
        attention_head_dim: int = 128,
        joint_attention_dim: int = 4096,
        in_channels: int = 16,
        axes_dims_rope: tuple[int, ...] = (16, 56, 56),
        dropout: float = 0.1,
        qk_norm: bool = True,
    ) -> None: ...

    assert first_arguments(init) == {
        "num_layers": 2,
        "num_attention_heads": HIDDEN // HEAD_SIZE,
        "attention_head_dim": HEAD_SIZE,
        "joint_attention_dim": HIDDEN,
        "axes_dims_rope": (2, 6, 8),
        "dropout": 0.0,
    }


def test_levels_in_the_middle_are_left_out_of_all_that_has_an_entry_for_each() -> None:
    def init(
        self: Any,
        down_block_types: tuple[str, ...] = ("Cross", "Cross", "Cross", "Down"),
        block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280),
        temporal: tuple[bool, ...] = (False, True, True),
        layers_per_block: tuple[int, ...] = (4, 3, 3, 3, 4),
        latents_mean: tuple[float, ...] = (0.5, 0.5, 0.5, 0.5),
        patch_size: tuple[int, ...] = (1, 2),
    ) -> None: ...

    assert first_arguments(init) == {
        "down_block_types": ("Cross", "Down"),
        "block_out_channels": (32, 64),
        "temporal": (False,),
        "layers_per_block": (1, 1, 1),
    }


def test_what_has_no_default_is_filled_in_step_by_step() -> None:
    def init(self: Any, out_channels: int, in_channels: int | None = None, patch_size: int | None = None) -> None: ...

    assert list(tiny_arguments(init)) == [
        {"out_channels": 8},
        {"out_channels": 8, "in_channels": 8},
        {"out_channels": 8, "in_channels": 8, "patch_size": 2},
    ]


@pytest.mark.parametrize(
    ("name", "head", "shared"),
    [
        ("FluxTransformer2DModel", "diffusion", {"img_ids", "txt_ids"}),
        ("WanTransformer3DModel", "diffusion", set()),
        ("UNet2DConditionModel", "diffusion", set()),
        ("AutoencoderKL", "autoencoder", set()),
    ],
)
def test_a_model_is_small_and_called_with_what_it_takes(name: str, head: str, shared: set[str]) -> None:
    model, batch = comparable(Family(name, head))
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert {name for name, each in batch.items() if isinstance(each, torch.Tensor) and len(each) != ROWS} == shared


def test_all_rows_share_what_has_none() -> None:
    batch = {"latents": torch.arange(ROWS), "ids": torch.zeros(6, 3), "text": [torch.ones(ROWS, 2)], "frames": 5}
    first, second = chunk(batch, 2)
    assert first["latents"].tolist() == [0, 1, 2, 3]
    assert second["latents"].tolist() == [4, 5, 6, 7]
    assert second["ids"] is batch["ids"]
    assert [each.shape for each in second["text"]] == [(4, 2)]
    assert second["frames"] == 5


@pytest.mark.parametrize(
    ("name", "head", "mesh", "share"),
    [
        ("FluxTransformer2DModel", "diffusion", "z=2", 0.55),
        ("QwenImageTransformer2DModel", "diffusion", "pipe=2 x x=2", 0.4),
        ("UNet2DConditionModel", "diffusion", "x=2", 0.6),
        ("AutoencoderKL", "autoencoder", "pipe=2", 0.8),
    ],
)
def test_a_model_trains_on_a_mesh(name: str, head: str, mesh: str, share: float, tmp_path: Path) -> None:
    (found,) = survey([Family(name, head)], [mesh], ["default"], tmp_path / "found.jsonl")
    assert found.verdict == "right", found.reason
    assert found.share < share, "no rank holds much more than its part of the parameters"
