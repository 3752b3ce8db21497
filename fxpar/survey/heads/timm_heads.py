"""Models of timm: the smallest of each widely used kind of network for images, with few layers if it can have few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.survey.heads.head import ROWS, Batch, Head

CLASSES, SIDES = 10, (32, 64, 224)
"""Of images, and their sides in pixels for models of one size: the first that a model takes counts."""

ANY_SIDE = 32
"""For all others."""

_NAMES = (
    "resnet18",
    "convnext_atto",
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
    "efficientnet_b0",
    "mobilenetv3_small_050",
    "regnetx_002",
    "densenet121",
    "mixer_s32_224",
    "beit_base_patch16_224",
    "cait_xxs24_224",
    "coatnet_pico_rw_224",
    "maxvit_pico_rw_256",
    "levit_128s",
    "pvt_v2_b0",
    "poolformer_s12",
    "mobilevit_xxs",
    "xcit_nano_12_p16_224",
    "eva02_tiny_patch14_224",
)

_FEW_LAYERS: tuple[Mapping[str, Any], ...] = (
    {"depth": 2},
    {"num_blocks": 2},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {"block_config": (1, 1, 1, 1)},
    {"depth": (1, 1, 1)},
    {},
)
"""What models call the number of their layers."""

_NARROW: tuple[Mapping[str, Any], ...] = ({"embed_dim": 64, "num_heads": 4}, {"embed_dim": 64}, {})
"""What models call their widths."""


class Classifier(nn.Module):
    """A model of timm with the loss of the classes that it predicts."""

    def __init__(self, model: nn.Module, img_size: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.side = img_size

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The cross entropy; of a model with several heads, the sum."""
        predicted = self.model(images)
        heads = [predicted] if isinstance(predicted, Tensor) else predicted
        return {"loss": torch.stack([nn.functional.cross_entropy(each, labels) for each in heads]).sum()}


def _names() -> Iterable[str]:
    try:
        import timm  # noqa: F401
    except Exception:  # torchvision, which it imports, raises what it likes beside another build of torch
        return ()
    return _NAMES


def _builds(name: str) -> Iterator[Callable[[], nn.Module]]:
    yield partial(_build, name)


def _build(name: str) -> nn.Module:
    import timm

    failure: Exception | None = None
    sides: tuple[Mapping[str, Any], ...] = (*({"img_size": side} for side in SIDES), {})
    for side, layers, width in product(sides, _FEW_LAYERS, _NARROW):
        try:
            return Classifier(timm.create_model(name, num_classes=CLASSES, **side, **layers, **width), **side)
        except Exception as error:
            failure = failure or error
    assert failure is not None, "there are arguments to try"
    raise failure


def _batches(model: nn.Module) -> Iterator[Batch]:
    assert isinstance(model, Classifier), "`_build` made it"
    side = model.side or ANY_SIDE
    yield {"images": torch.randn(ROWS, 3, side, side), "labels": torch.randint(0, CLASSES, (ROWS,))}


HEADS: Mapping[str, Head] = {"timm": Head(_names, _builds, _batches)}
"""Models of timm that classify images."""
