"""Methods of models that need all parameters in one process, which distributed models refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn

from fxpar.errors import OneProcessMethodError

_SAVE = "call fxpar.save_pretrained(model, folder) on all ranks"

_REMEDIES: Mapping[str, str] = {
    "save_pretrained": _SAVE,
    "push_to_hub": f"{_SAVE}, and upload that folder",
    "generate": f"{_SAVE}, load that folder in one process by from_pretrained, and generate there",
}
"""By the name of a method, what to do in place of calling it. Models of transformers and diffusers have them."""


def refused_methods(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """For each method of `cls` that needs all parameters, one of its name that raises a OneProcessMethodError.

    A call that brings them, as `state_dict`, does not need those of the model.
    """
    return {name: _refusal(getattr(cls, name), name) for name in _REMEDIES if hasattr(cls, name)}


@cache
def _refusal(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None:
            return plain(self, *args, **kwargs)
        raise OneProcessMethodError(type(self).__name__, name, _REMEDIES[name])

    return refuse
