"""What a lowering is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, fx


class Lowering(Protocol):
    """Turn a local ATen graph into code.

    The graph is functional, in local shapes, with a fake value on every node, and its collectives are functional ones.
    The callable takes a real tensor for each placeholder, with the strides of its fake, and returns what the graph
    returns, None and repeated values included, with the strides of their fakes. It is called with grad disabled, and
    changes none of its arguments.
    """

    def __call__(self, graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]: ...
