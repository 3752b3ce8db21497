"""Put other values in the place of what a call returns."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx


def replace_items(call: fx.Node, values: Sequence[Any]) -> None:
    """Erase `call`, which returns a tuple, and replace the items that its users take by those of `values`."""
    for item in list(call.users):
        assert item.target is operator.getitem, f"{item} takes all that {call} returns"
        _, position = item.args
        assert isinstance(position, int), f"{item} takes no item of {call}"
        item.replace_all_uses_with(values[position])
        call.graph.erase_node(item)
    call.graph.erase_node(call)
