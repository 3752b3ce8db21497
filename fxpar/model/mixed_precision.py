"""Which parameters a step uses in another dtype than they are stored in, and what their modules do for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import PrecisionPatternError
from fxpar.ir.precision import Precision
from fxpar.model.logical_parameters import LogicalParameter


def in_precision(
    parameters: Mapping[str, LogicalParameter], precision: Precision | None
) -> dict[str, LogicalParameter]:
    """The parameters with the dtypes that `precision` gives them.

    Raises:
        PrecisionPatternError: a pattern of `precision.keep` matches no parameter.
    """
    if precision is None:
        return dict(parameters)
    kept = _kept(parameters, precision)
    return {
        fqn: replace(parameter, compute_dtype=precision.compute, reduce_dtype=precision.reduce)
        if parameter.dtype.is_floating_point and fqn not in kept
        else parameter
        for fqn, parameter in parameters.items()
    }


def _kept(parameters: Mapping[str, LogicalParameter], precision: Precision) -> set[str]:
    kept = {fqn for fqn, p in parameters.items() if any(_has_float_buffers(module) for module, _ in p.homes)}
    for pattern in precision.keep:
        found = [fqn for fqn in parameters if fnmatchcase(fqn, pattern)]
        if not found:
            raise PrecisionPatternError(pattern, list(parameters))
        kept.update(found)
    return kept


def _has_float_buffers(module: nn.Module) -> bool:
    return any(buffer is not None and buffer.is_floating_point() for buffer in module._buffers.values())


def compute_dtypes(parameters: Mapping[str, LogicalParameter]) -> dict[nn.Module, torch.dtype]:
    """The dtype in which modules with floating-point parameters of their own compute; none where these differ in it."""
    of_module: dict[nn.Module, set[torch.dtype]] = {}
    for parameter in parameters.values():
        if parameter.compute_dtype.is_floating_point:
            for module, _ in parameter.homes:
                of_module.setdefault(module, set()).add(parameter.compute_dtype)
    return {module: next(iter(dtypes)) for module, dtypes in of_module.items() if len(dtypes) == 1}


def converting_forward(plain: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A forward that converts the floating-point tensors among its arguments to `dtype`."""

    def converted(given: Any) -> Any:
        return given.to(dtype) if isinstance(given, Tensor) and given.is_floating_point() else given

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *map(converted, args), **{name: converted(given) for name, given in kwargs.items()})

    return forward
