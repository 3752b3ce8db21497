"""Models of diffusers: what denoises latents, and what makes latents of images, videos and sounds, and the reverse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from fxpar.survey.heads import diffusers_batches
from fxpar.survey.heads.head import Batch, Head, WithLoss
from fxpar.survey.heads.tiny_arguments import tiny_arguments


def _classes(packages: Iterable[str]) -> Mapping[str, Any]:
    """The models that packages of diffusers export."""
    from diffusers import ModelMixin

    exported = [each for package in packages for each in vars(import_module(package)).values()]
    return {each.__name__: each for each in exported if inspect.isclass(each) and issubclass(each, ModelMixin)}


def _builds(packages: Iterable[str], name: str) -> Iterator[Callable[[], nn.Module]]:
    model = _classes(packages)[name]
    for arguments in tiny_arguments(model.__init__):
        yield partial(_build, model, arguments)


def _build(model: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    return WithLoss(model(**arguments))


def _batches(model: nn.Module) -> Iterator[Batch]:
    assert isinstance(model, WithLoss), "`_builds` made it"
    yield from diffusers_batches.batches(model.model)


def _head(*packages: str) -> Head:
    return Head(partial(_classes, packages), partial(_builds, packages), _batches)


HEADS: Mapping[str, Head] = {
    "diffusion": _head("diffusers.models.transformers", "diffusers.models.unets"),
    "autoencoder": _head("diffusers.models.autoencoders"),
}
"""The heads, by what a model is for."""
