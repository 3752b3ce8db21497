"""The fake values of calls that are changed in, or added to, a graph from Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import FakeTensor


def value_of_call(
    target: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """What `target` returns for these arguments, with the fake values of nodes among them; one at least has one.

    Args:
        target: a function, or the name of a method of the first argument.
    """
    given = fx.map_arg((tuple(args), dict(kwargs or {})), lambda node: node.meta["example_value"])
    mode = next(value.fake_mode for value in pytree.tree_leaves(given) if isinstance(value, FakeTensor))
    args, kwargs = given
    with mode:  # or numbers among the arguments would become real tensors
        return target(*args, **kwargs) if callable(target) else getattr(args[0], target)(*args[1:], **kwargs)


def add_call(before: fx.Node, target: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of a function, or of the method `target`, in front of a node, of the same module and source line."""
    op = "call_method" if isinstance(target, str) else "call_function"
    with before.graph.inserting_before(before):
        added = before.graph.create_node(op, target, args, kwargs)
    added.meta = {**before.meta, "example_value": value_of_call(target, args, kwargs)}
    return added
