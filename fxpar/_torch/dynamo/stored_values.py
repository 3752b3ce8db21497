"""What the trace has stored in objects from outside of it: containers that it made may change while they are there."""

from collections.abc import Hashable
from typing import Any

from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable


class UnknownContentsError(Exception):
    """An object that the trace made may hold anything."""


def contents(value: VariableTracker, met: dict[int, VariableTracker]) -> Hashable:
    """Describes a value, such that what it holds has changed if the description has.

    Args:
        met: filled with all that was met by its id, which tells objects apart as long as they live.

    Raises:
        UnknownContentsError: it holds something that the trace made other than a tensor, constant, list, tuple or dict.
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
        raise UnknownContentsError
    return id(value)
