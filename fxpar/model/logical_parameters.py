"""The parameters of a model as it was before it was distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fxpar.ir.parallel_styles import StyledParameter


@dataclass(frozen=True, slots=True)
class LogicalParameter:
    """A parameter of the original model.

    `fqn` is its first name; `homes` are all (module, attribute) pairs that hold it, several if it is tied. It is stored
    in `dtype`; a step computes with it in `compute_dtype`, and sums its gradient in `reduce_dtype`.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    homes: tuple[tuple[nn.Module, str], ...]
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def styled(self) -> StyledParameter:
        """What parallel styles ask of it."""
        return StyledParameter(self.homes[0][0], self.shape)


def logical_parameters(model: nn.Module) -> dict[str, LogicalParameter]:
    """Every parameter of `model` once, by its first name, with all modules and attributes that hold it."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    named: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in homes:
                named[f"{path}.{attribute}" if path else attribute] = parameter
            homes.setdefault(id(parameter), []).append((module, attribute))
    return {
        fqn: LogicalParameter(fqn, tuple(p.shape), p.dtype, p.requires_grad, tuple(homes[id(p)]), p.dtype, p.dtype)
        for fqn, p in named.items()
    }


def names_of(parameters: Mapping[str, LogicalParameter], model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter in `model`, by its first one; several if it is tied."""
    paths = {module: path for path, module in model.named_modules()}
    return {
        fqn: [f"{paths[module]}.{attribute}" if paths[module] else attribute for module, attribute in parameter.homes]
        for fqn, parameter in parameters.items()
    }
