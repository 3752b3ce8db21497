"""Find what a forward calls "loss" in what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

NAME = "loss"


def named_loss(output: Any) -> Any:
    """The value under the key, or of the field, "loss" of `output`, or of what it contains; None if there is none.

    Dictionaries, named tuples, dataclasses and the outputs of Hugging Face models are searched, outer ones before those
    that they contain. Dynamo traces this.
    """
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        output = output._asdict()
    elif is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, Mapping):
        if output.get(NAME) is not None:
            return output[NAME]
        output = list(output.values())
    if not isinstance(output, tuple | list):
        return None
    for value in output:
        found = named_loss(value)
        if found is not None:
            return found
    return None
