"""What models of diffusers are called with: by the names of the forward's parameters and the sizes in the config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.survey.heads.head import ROWS, Batch
from fxpar.survey.heads.tiny_arguments import HEAD_SIZE, HIDDEN, TEXT_LENGTH

FRAMES = 5
"""Of a video: one more than a multiple of what is made of it at once."""

SIDE = 4
"""Of an image as a square of tokens."""

_CHOICES = (
    r"time\w*(?<!cond)(?<!_r)|t|\w*encoder_hidden_states|pooled\w*|(img|txt)_\w*|guidance|class_labels|text_encoder_layers|"
    r"global_hidden_states|(audio_)?num_frames|height|width",
    r"time\w*(?<!cond)(?<!_r)|t|\w*hidden_states(?!_image)\w*|\w*mask(?!s)\w*|\w*_embeds|style|image_\w*|\w*num_frames",
    r"time\w*(?<!cond)(?<!_r)|t|\w*encoder_hidden_states",
    r"",
)
"""Patterns of the names of what is given of all that has a default, most likely first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What is to be denoised, encoded or decoded, and the sizes that it has in tokens.

    `is_timed` if each frame has a time of its own, and each token what it is to be like.
    """

    value: Tensor
    frames: int
    height: int
    width: int
    is_timed: bool = False

    @property
    def length(self) -> int:
        """Of the sample as a sequence of tokens."""
        return self.frames * self.height * self.width


_Form = Callable[[int, int], Sample]
"""Makes a sample of so many channels and so long a side."""


def batches(model: nn.Module) -> Iterator[Batch]:
    """Arguments for the forward of a model of diffusers, most likely first."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    config: Any = model.config
    for sample, names in product(_samples(type(model).__name__, config), _CHOICES):
        given = {
            each.name: _argument(each.name, sample, config)
            for each in parameters[1:]
            if each.default is inspect.Parameter.empty or re.fullmatch(names, each.name)
        }
        yield {parameters[0].name: sample.value, **{name: each for name, each in given.items() if each is not None}}


def _samples(name: str, config: Mapping[str, Any]) -> Iterator[Sample]:
    forms: list[_Form] = [_image, _tokens, _video, _video_of_images, _video_of_tokens, _sound]
    likely = [form for words, form in _FORMS.items() if re.search(words, name)]
    forms = likely + [form for form in forms if form not in likely]
    patch = _patch(config)
    for size, channels, form in product((2 * SIDE, 4 * SIDE), _channels(config), forms):
        yield _in_patches(form(channels, size), patch)
    for channels, form in product(_channels(config), likely):
        yield _in_patches(form(channels, 8 * SIDE), patch)
    for channels, form in product(_channels(config), forms):
        yield replace(_in_patches(form(channels, 2 * SIDE), patch), is_timed=True)


def _channels(config: Mapping[str, Any]) -> list[int]:
    named = r"(in|input|io|audio)_(visual_)?(channels|dim)|num_(channels|mels)|mel_bins|latent_(channels|dim)"
    found = [value for name, value in config.items() if re.fullmatch(named, name) and isinstance(value, int)]
    conditioned = [2 * value + 1 for value in found]  # beside it are what it is to be like, and where
    return list(dict.fromkeys([*found, 3, 2, HIDDEN, *conditioned])) if found else [1, HIDDEN]


def _patch(config: Mapping[str, Any]) -> tuple[int, int]:
    """Frames of a patch, and pixels of its sides."""
    patch = config.get("patch_size")
    if isinstance(patch, (list, tuple)):
        return (patch[0] if len(patch) == 3 else 1), patch[-1]
    return config.get("patch_size_t") or 1, patch or 1


def _in_patches(sample: Sample, patch: tuple[int, int]) -> Sample:
    if sample.value.ndim == 3:
        return sample  # tokens already
    frames, side = patch
    return replace(sample, frames=sample.frames // frames, height=sample.height // side, width=sample.width // side)


def _image(channels: int, size: int) -> Sample:
    return Sample(torch.randn(ROWS, channels, size, size), 1, size, size)


def _tokens(channels: int, size: int) -> Sample:
    return Sample(torch.randn(ROWS, (size // 2) ** 2, channels), 1, size // 2, size // 2)


def _video(channels: int, size: int) -> Sample:
    return Sample(torch.randn(ROWS, channels, FRAMES, size, size), FRAMES, size, size)


def _video_of_images(channels: int, size: int) -> Sample:
    return Sample(torch.randn(ROWS, FRAMES, channels, size, size), FRAMES, size, size)


def _video_of_tokens(channels: int, size: int) -> Sample:
    return Sample(torch.randn(ROWS, FRAMES, size, size, channels), FRAMES, size, size)


def _sound(channels: int, size: int) -> Sample:
    return Sample(torch.randn(ROWS, channels, size * size), 1, size, size)


_FORMS: Mapping[str, _Form] = {
    "3D|Video|Allegro|CogVideoX|Cosmos|Magvit|Mochi|Wan|QwenImage$|VidTok|SRVAE|Motion|SpatioTemporal": _video,
    "1D|Audio|Oobleck|Vocoder|SAME|Music": _sound,
}


def _argument(name: str, sample: Sample, config: Mapping[str, Any]) -> Any:
    make = next((each for pattern, each in _ARGUMENTS.items() if re.fullmatch(pattern, name)), None)
    return make(sample, config) if make else None


def _axes(config: Mapping[str, Any]) -> int:
    parts = next((value for name, value in config.items() if re.fullmatch(r"(rope_)?axes_dims?\w*", name)), None)
    return len(parts) if parts else 3


def _times(sample: Sample, config: Mapping[str, Any]) -> Tensor:
    return torch.rand(ROWS, sample.frames) if sample.is_timed else torch.rand(ROWS)


def _text(sample: Sample, config: Mapping[str, Any]) -> Tensor:
    return torch.randn(ROWS, sample.length if sample.is_timed else TEXT_LENGTH, HIDDEN)


def _guidance(sample: Sample, config: Mapping[str, Any]) -> Tensor | None:
    return torch.rand(ROWS) if config.get("guidance_embeds") else None


def _class_labels(sample: Sample, config: Mapping[str, Any]) -> Tensor | None:
    has_classes = any(config.get(name) for name in ("num_class_embeds", "num_embeds_ada_norm", "class_embed_type"))
    return torch.randint(0, 8, (ROWS,)) if has_classes else None


def _positions(sample: Sample, config: Mapping[str, Any]) -> Tensor:
    grid = torch.meshgrid(*map(torch.arange, (sample.frames, sample.height, sample.width)), indexing="ij")
    positions = torch.stack(grid, dim=-1).reshape(sample.length, 3)
    return torch.nn.functional.pad(positions, (0, _axes(config) - 3)).float()


def _like(sample: Sample, channels: int | None) -> Tensor:
    return torch.randn(ROWS, channels or sample.value.shape[1], *sample.value.shape[2:])


def _beside(sample: Sample, config: Mapping[str, Any]) -> Tensor:
    """What is concatenated with a sequence of tokens."""
    return torch.randn(*sample.value.shape[:-1], max(config.get("in_channels", 0) - sample.value.shape[-1], 1))


def _rotary(sample: Sample, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    angles = torch.rand(sample.length, HEAD_SIZE)
    return angles.cos(), angles.sin()


_ARGUMENTS: Mapping[str, Callable[[Sample, Mapping[str, Any]], Any]] = {
    r"guidance": _guidance,
    r"class_labels": _class_labels,
    r"\w*mask\w*": lambda *_: torch.ones(ROWS, TEXT_LENGTH, dtype=torch.bool),
    r"\w*timesteps?\w*|t|\w*time|sigma|timestep_ratio|fps": _times,
    r"style": lambda *_: torch.zeros(ROWS, dtype=torch.long),
    r"clip_text_pooled": lambda *_: torch.rand(ROWS, 1, HIDDEN),
    r"\w*pooled\w*|proj_embedding|global_hidden_states|image_embeddings": lambda *_: torch.rand(ROWS, HIDDEN),
    r"audio_hidden_states": lambda _, config: torch.randn(ROWS, FRAMES, config.get("audio_in_channels", HIDDEN)),
    r"control_hidden_states": lambda sample, config: _like(sample, config.get("vace_in_channels")),
    r"pose_hidden_states": lambda sample, config: _like(sample, config.get("latent_channels")),
    r"text_encoder_layers": lambda *_: [torch.randn(ROWS, TEXT_LENGTH, HIDDEN)] * 4,
    r"audio_num_frames": lambda *_: FRAMES,
    r"prior_token_id": lambda sample, _: torch.randint(0, 96, (ROWS, sample.length)),
    r"prior_token_drop": lambda sample, _: torch.zeros(ROWS, sample.length, dtype=torch.bool),
    r"\w*encoder_hidden_states\w*|text_bth|cap_feats|clip_text": _text,
    r"indices_\w*": lambda sample, _: torch.arange(sample.frames),
    r"image_embed\w*": lambda *_: torch.randn(ROWS, TEXT_LENGTH, HIDDEN),
    r"img_ids|position_ids": _positions,
    r"txt_ids": lambda _, config: torch.zeros(TEXT_LENGTH, _axes(config)),
    r"original_size|target_size|crop_coords": lambda *_: torch.rand(ROWS, 2),
    r"added_time_ids": lambda *_: torch.rand(ROWS, 3),
    r"image_meta_size": lambda *_: torch.rand(ROWS, 6),
    r"micro_conds": lambda *_: torch.rand(ROWS, 5),
    r"text_lens": lambda *_: torch.full((ROWS,), TEXT_LENGTH),
    r"num_frames": lambda sample, _: sample.frames,
    r"height": lambda sample, _: sample.height,
    r"width": lambda sample, _: sample.width,
    r"img_shapes": lambda sample, _: [(sample.frames, sample.height, sample.width)],
    r"visual_rope_pos": lambda sample, _: tuple(map(torch.arange, (sample.frames, sample.height, sample.width))),
    r"text_rope_pos": lambda *_: torch.arange(TEXT_LENGTH),
    r"(image|video)_rotary_emb|rotary_embedding": _rotary,
    r"context_latents": _beside,
    r"image_latents|latent_cond": lambda sample, _: torch.randn_like(sample.value),
}
"""Patterns of names, and what a parameter of such a name is given; None is as if it were not there."""
