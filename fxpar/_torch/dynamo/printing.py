"""What a forward prints is printed while Dynamo traces it: once, and of tensors their types alone."""

import functools
from typing import Any

from torch import Tensor
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import IgnoredFunctionVariable, StringFormatVariable

from fxpar._torch.compiler import traces_wider


@functools.cache
def trace_prints() -> None:
    """Let Dynamo trace past `print`, which would break the graph, within `wider_tracing`."""
    build = VariableBuilder.__call__

    def __call__(self: VariableBuilder, value: object) -> VariableTracker:
        return _Print(value) if value is print and traces_wider() else build(self, value)

    VariableBuilder.__call__ = __call__  # type: ignore[method-assign]


class _Print(IgnoredFunctionVariable):
    def call_function(
        self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        options = {name: _shown(kwargs[name]) for name in ("sep", "end") if name in kwargs}
        print(*map(_shown, args), **options)
        return ConstantVariable.create(None)


class _Unknown:
    """What has no value in a trace; as text it says what is known, whatever format is asked for."""

    def __init__(self, known: str) -> None:
        self._known = known

    def __repr__(self) -> str:
        return self._known

    def __format__(self, spec: str) -> str:
        return self._known


def _shown(given: VariableTracker) -> Any:
    given = given.realize()
    if isinstance(given, StringFormatVariable):
        named = {name: _shown(value) for name, value in given.sym_kwargs.items()}
        return given.format_string.format(*map(_shown, given.sym_args), **named)
    if isinstance(given, TensorVariable):
        example: Tensor = given.as_proxy().node.meta["example_value"]
        return _Unknown(f"Tensor({example.dtype}, {tuple(example.shape)})")
    if given.is_python_constant():
        return given.as_python_constant()
    if isinstance(given, BaseListVariable):
        return [_shown(item) for item in given.items]
    return _Unknown(f"<{given.python_type_name()}>")
