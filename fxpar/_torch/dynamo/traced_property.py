"""Properties that Dynamo need not trace."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

PARAMETER_NAMES = "_fxpar_parameter_names"
"""The attribute of a class with the names of its module's parameters, in order, wherever the parameters are."""


class TracedProperty(property):
    """A property of modules that is, while Dynamo traces, the result of an op; its getter need not be traced.

    Args:
        fget: returns its value; where Dynamo traces it all the same, the result of the op.
        op: called with a tensor and constants.
        tensor: the module and the name under which the tensor is found.
        constants: the other arguments.
    """

    def __init__(
        self, fget: Callable[[Any], Any], op: Callable[..., Tensor], tensor: tuple[str, str], constants: Sequence[Any]
    ) -> None:
        super().__init__(fget)
        self.op, self.tensor, self.constants = op, tensor, tuple(constants)


def name_of(found: TracedProperty, module: nn.Module) -> str:
    """The name of the property in the module's class."""
    return next(name for name, value in vars(type(module)).items() if value is found)


def are_equal_classes(cls: Any, expected: type) -> bool:
    """Whether it is the expected class, or one that differs from it in the values of traced properties alone."""
    if cls is expected:
        return True
    own, others = vars(cls), vars(expected)
    if cls.__bases__ != expected.__bases__ or own.keys() != others.keys():
        return False
    pairs = [(own[name], others[name]) for name in own if name not in ("__dict__", "__weakref__", "__doc__")]
    return any(type(each) is TracedProperty for each, _ in pairs) and all(
        type(each) is type(other) is TracedProperty or each is other or each == other for each, other in pairs
    )
