"""The families of models that are tried, each as a tiny random model and the arguments of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

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

    def builds(self) -> Iterator[Callable[[], nn.Module]]:
        """Functions that make a model with random weights, in training mode, smallest first."""
        for build in HEADS[self.head].builds(self.name):
            yield partial(_seeded, build)

    def batches(self, model: nn.Module) -> Iterator[Batch]:
        """Arguments by which the forward of such a model may be called, most likely first."""
        torch.manual_seed(1)
        yield from HEADS[self.head].batches(model)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():  # of weights that are computed, as by weight norms, copies can then be made
        model = build()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)  # zeros keep gradients from all that is before them
    return model.train()


def all_families(heads: Iterable[str] = tuple(HEADS)) -> Iterator[Family]:
    """All families of the installed libraries with one of the heads, by head and name."""
    for head in heads:
        yield from (Family(name, head) for name in HEADS[head].names())
