"""How modules of a distributed model read their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor, nn

from fxpar._torch.dynamo.traced_property import TracedProperty
from fxpar.model.distribution import Distribution
from fxpar.model.logical_parameters import LogicalParameter

TRAINED, FROZEN = torch.empty(0, device="cpu", requires_grad=True), torch.empty(0, device="cpu")
"""Two tensors that stand in for all parameters: Dynamo wraps and guards each tensor that it meets, which is slow."""


def logical_properties(
    parameter: LogicalParameter, distribution: Distribution
) -> Iterator[tuple[nn.Module, str, TracedProperty]]:
    """For each module and attribute that holds the parameter, the property by which the module's class reads it.

    It gives the local `DTensor`, on other stages one without values; in a trace, the marker of the logical parameter.
    """
    elsewhere = cache(partial(_without_values, parameter))  # one for all homes
    for module, attribute in parameter.homes:
        yield module, attribute, _logical_property(parameter, attribute, elsewhere, distribution)


def _logical_property(
    parameter: LogicalParameter, attribute: str, elsewhere: Callable[[], nn.Parameter], distribution: Distribution
) -> TracedProperty:
    fqn, requires_grad = parameter.fqn, parameter.requires_grad
    described = tuple(parameter.shape), parameter.compute_dtype, distribution.mesh.device_type, fqn, distribution.handle

    def read(module: nn.Module) -> Tensor:
        if torch.compiler.is_dynamo_compiling():  # not where Dynamo itself reads it, to make a guard
            marked: Tensor = torch.ops.fxpar.param(TRAINED if requires_grad else FROZEN, *described)
            return marked
        held = module._parameters.get(attribute)
        return elsewhere() if held is None else held

    stand_in = __name__, "TRAINED" if requires_grad else "FROZEN"
    return TracedProperty(read, torch.ops.fxpar.param, stand_in, described)


def _without_values(parameter: LogicalParameter) -> nn.Parameter:
    """What ranks of other stages see of a parameter: its shape, and a tensor that can be written to without effect.

    So scripts may show a layer, whose biases are asked whether they are None, and set its parameters, on all ranks. Who
    needs the values is told by PyTorch that a meta tensor has none.
    """
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(whole, parameter.requires_grad)
