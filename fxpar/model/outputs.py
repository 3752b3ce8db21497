"""Change the tensors in the output of a forward, which Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def map_tensors(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """`output` with `change` of each tensor in place of it, also in dataclasses that pytree does not know."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return type(leaf)(**{each.name: map_tensors(change, getattr(leaf, each.name)) for each in fields(leaf)})
        return leaf

    return pytree.tree_map(changed, output)
