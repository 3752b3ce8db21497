"""Stand-ins for tensors that a forward stores on an object, such as the key-value cache of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from fxpar._torch.dynamo.stand_ins import StandIn
from fxpar.errors import UnavailableTensorError


class UnavailableTensor(StandIn):
    """A stand-in for a tensor that no rank has whole; any use raises UnavailableTensorError.

    Args:
        where: the source line that stores it.
    """

    def __init__(self, where: str) -> None:
        self.kept_at = where

    def __repr__(self) -> str:
        return f"UnavailableTensor({self.kept_at})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnavailableTensorError(self.kept_at)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # copy, pickle and others look these up on every object
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        next(_unavailable((args, kwargs)))._refuse()

    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __index__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def _unavailable(arguments: Any) -> Iterator[UnavailableTensor]:
    """The stand-ins among nested arguments."""
    if isinstance(arguments, UnavailableTensor):
        yield arguments
    elif isinstance(arguments, Mapping):
        yield from _unavailable(list(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _unavailable(argument)


def with_kept(
    step: Callable[..., Sequence[Any]], kept: Mapping[int, str], constants: Callable[[], Mapping[int, Tensor]]
) -> Callable[..., Sequence[Any]]:
    """`step`, with what it does not return inserted: the tensors that the forward stores on objects, or stand-ins.

    Args:
        kept: by position among all that is to be returned, the source line that stores the tensor.
        constants: returns, by position, those that this rank has.
    """
    unavailable = {position: UnavailableTensor(where) for position, where in sorted(kept.items())}

    def run(*args: Any) -> Sequence[Any]:
        returned, made = list(step(*args)), constants()
        for position, stand_in in unavailable.items():
            returned.insert(position, made.get(position, stand_in))
        return tuple(returned)

    return run if unavailable else step
