"""Operations and values as text, whose equality means that the same code computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class _Bare:
    """Text whose repr has no quotes, so that a reference to a node differs from a string constant."""

    text: str

    def __repr__(self) -> str:
        return self.text


def describe_call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The op of `node` with its arguments, where nodes have the given names, and devices no index."""
    return f"{node.target}{describe_arguments((node.args, node.kwargs), names)}"


def describe_arguments(given: Any, names: Mapping[fx.Node, str]) -> str:
    """Arguments of a call, nested in any way, where nodes have the given names, and devices no index."""

    def described(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return _Bare(names[argument])
        return argument.type if isinstance(argument, torch.device) else argument

    return str(fx.node.map_aggregate(given, described))


def describe(found: Any) -> str:
    """Type, device, shape and strides of a fake value, or of each tensor of a tuple."""
    if isinstance(found, Tensor):
        return f"{found.dtype} {found.device.type} {tuple(found.shape)} {found.stride()}"
    if isinstance(found, tuple | list):
        return f"({', '.join(map(describe, found))})"
    return repr(found)
