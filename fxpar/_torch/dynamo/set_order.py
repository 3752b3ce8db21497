"""Let all ranks trace what a forward does with the items of a set in one order."""

import functools
from collections.abc import Iterable
from typing import Any

from torch._dynamo import variables
from torch._dynamo.variables.base import VariableTracker

# In which module of `variables` these are depends on the release.
SetVariable, OrderedSetVariable = vars(variables)["SetVariable"], vars(variables).get("OrderedSetVariable", ())


@functools.cache
def trace_sets_in_one_order() -> None:
    """Let Dynamo iterate over sets of constants by how these are written.

    Python's own order depends on hashes, which are others in each process: a forward that iterates over a set of names,
    as that of Gemma 4 over its kinds of layers, would be another graph on each rank.
    """
    initialise = SetVariable.__init__

    def __init__(self: Any, items: Iterable[Any], **kwargs: Any) -> None:
        initialise(self, items, **kwargs)
        if not isinstance(self, OrderedSetVariable):
            self.items, self.original_items = _in_order(self.items), _in_order(self.original_items)

    SetVariable.__init__ = __init__


def _in_order(items: dict[Any, VariableTracker]) -> dict[Any, VariableTracker]:
    # Items are wrapped to be hashed; torch 2.11 wraps them only in one of the two dictionaries.
    keys = {item: getattr(item, "vt", item) for item in items}
    if not all(isinstance(key, variables.ConstantVariable) for key in keys.values()):
        return items
    return dict(sorted(items.items(), key=lambda pair: repr(keys[pair[0]].as_python_constant())))
