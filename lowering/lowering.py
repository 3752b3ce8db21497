"""The protocol of lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, fx


class Lowering(Protocol):
    """Compiles a local ATen graph into a callable.

    The graph is functional, in local shapes, with a fake value on every node and with functional collectives. The
    callable takes a real tensor for each placeholder, with the strides of its fake tensor. It returns what the graph
    returns, including None and repeated values, with the strides of the fake tensors. It is called with grad disabled,
    and mutates none of its arguments.
    """

    def __call__(self, graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]: ...
