"""Describe values in a trace: the arguments of a layer, and what objects hold that the trace has stored."""

from collections.abc import Hashable, Mapping
from typing import Any

from torch import fx
from torch._dynamo.guards import extract_tensor_metadata
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable


class NotEqualError(Exception):
    """A call is not known to be equal to one that was traced, or cannot be copied."""


def describe(arguments: Any, tensors: list[fx.Node]) -> Any:
    """What a trace depends on of arguments: constants, and types of tensors, whose nodes are appended to `tensors`.

    Raises:
        NotEqualError: there are others than tensors, constants, and tuples of these.
    """
    if isinstance(arguments, Mapping):
        return tuple((name, describe(each, tensors)) for name, each in arguments.items())
    if isinstance(arguments, tuple | list):
        return tuple(describe(each, tensors) for each in arguments)
    variable = arguments.realize() if isinstance(arguments, VariableTracker) else arguments
    if type(variable) is TensorVariable:
        node = variable.as_proxy().node
        position = tensors.index(node) if node in tensors else len(tensors)
        tensors.append(node)
        return "tensor", position, extract_tensor_metadata(node.meta["example_value"])
    if type(variable) is ConstantVariable:
        return "constant", type(variable.value), variable.value
    if type(variable) is TupleVariable:
        return "tuple", describe(variable.items, tensors)
    raise NotEqualError


def contents(value: VariableTracker, met: dict[int, VariableTracker]) -> Hashable:
    """Describes a value that the trace has stored: if what it holds changes, the description does.

    Args:
        met: filled with all that was met by its id, which tells objects apart as long as they live.

    Raises:
        NotEqualError: it holds something that the trace made other than a tensor, constant, list, tuple or dict.
    """
    if isinstance(value, LazyVariableTracker) and value.is_realized():
        value = value.realize()
    if isinstance(value, TensorVariable):
        return value.as_proxy().node
    if isinstance(value, ConstantVariable):
        return "constant", type(value.value), value.value
    is_known = id(value) in met
    met[id(value)] = value
    if is_known:
        return id(value)
    if isinstance(value, BaseListVariable):
        return id(value), tuple(contents(item, met) for item in value.items)
    if isinstance(value, ConstDictVariable):
        held: dict[Any, VariableTracker] = value.items
        return id(value), tuple((contents(key.vt, met), contents(item, met)) for key, item in held.items())
    if value.source is None or isinstance(value.mutation_type, ValueMutationNew | AttributeMutationNew):
        raise NotEqualError
    return id(value)
