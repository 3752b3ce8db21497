"""Find the value named "loss" in the output of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

NAME = "loss"


def named_loss(output: Any) -> Any:
    """The tensor under the key or field "loss" in `output`, or in a value nested in it; None if there is none.

    Dictionaries, named tuples, dataclasses and the outputs of Hugging Face models are searched, outer ones before
    nested ones. Dynamo traces this function.
    """
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        output = output._asdict()
    elif is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, Mapping):
        if isinstance(output.get(NAME), Tensor):
            return output[NAME]
        output = list(output.values())
    if not isinstance(output, tuple | list):
        return None
    for value in output:
        found = named_loss(value)
        if found is not None:
            return found
    return None
