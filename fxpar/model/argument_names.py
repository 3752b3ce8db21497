"""Names of a forward's tensor arguments, for error messages."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree


def argument_names(cls: type[nn.Module], structure: pytree.TreeSpec) -> list[str]:
    """The name of each leaf of (args, kwargs), nested as in `structure`: "tokens", or "batch['image']" in a dict."""
    positions = list(range(structure.num_leaves))
    args, kwargs = pytree.tree_unflatten(positions, structure)
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    positional += [f"argument {position}" for position in range(len(positional), len(args))]
    names = dict.fromkeys(positions, "")
    for name, value in [*zip(positional, args, strict=False), *kwargs.items()]:
        names |= _leaves(name, value)
    return [names[position] for position in positions]


def _leaves(name: str, value: Any) -> dict[int, str]:
    """The names of the positions inside `value`, which is called `name`."""
    if isinstance(value, int):
        return {value: name}
    if isinstance(value, dict):
        inside = {f"[{key!r}]": entry for key, entry in value.items()}
    else:
        entries = value if isinstance(value, list | tuple) else pytree.tree_leaves(value)
        inside = {f"[{place}]": entry for place, entry in enumerate(entries)}
    return {position: found for key, entry in inside.items() for position, found in _leaves(name + key, entry).items()}
