"""The families of models that are tried, each as a tiny random model and the arguments of its forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fxpar.survey.heads import diffusers_heads, timm_heads, transformers_heads
from fxpar.survey.heads.head import Batch, Head

HEADS: Mapping[str, Head] = {**transformers_heads.HEADS, **diffusers_heads.HEADS, **timm_heads.HEADS}
"""The heads that are tried."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family, by the name that its library has for it, and one of its heads."""

    name: str
    head: str

    def build(self) -> nn.Module:
        """A tiny model with random weights, in training mode.

        Raises:
            and whatever its configuration or model does, if its sizes do not fit together.
        """
        torch.manual_seed(0)
        with torch.no_grad():  # of weights that are computed, as by weight norms, copies can then be made
            model = HEADS[self.head].build(self.name)
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.02)  # zeros keep gradients from all that is before them
        return model.train()

    def batches(self, model: nn.Module) -> Iterator[Batch]:
        """Arguments by which the forward of the model that `build` made may be called, most likely first."""
        torch.manual_seed(1)
        yield from HEADS[self.head].batches(model)


def all_families() -> Iterator[Family]:
    """All families of the installed libraries, by head and name."""
    for head, kind in HEADS.items():
        yield from (Family(name, head) for name in kind.names())
