"""What a user finds where a forward keeps a tensor on an object, such as the cache of keys and values of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from fxpar.errors import UnavailableTensorError


class UnavailableTensor:
    """Stands for a tensor that no rank has whole, and that nobody may need: it says so when it is used.

    Args:
        where: the source line that keeps it.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __repr__(self) -> str:
        return f"UnavailableTensor({self._where})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnavailableTensorError(self._where)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what copy, pickle and others ask every object for
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
    """Those among nested arguments."""
    if isinstance(arguments, UnavailableTensor):
        yield arguments
    elif isinstance(arguments, Mapping):
        yield from _unavailable(list(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _unavailable(argument)


def with_unavailable(step: Callable[..., Sequence[Any]], kept: Mapping[int, str]) -> Callable[..., Sequence[Any]]:
    """`step`, whose results are all that leaves a forward but what that keeps on objects.

    Args:
        kept: for the positions of the latter in what is to be returned, the source lines.
    """
    unavailable = {position: UnavailableTensor(where) for position, where in sorted(kept.items())}

    def run(*args: Any) -> Sequence[Any]:
        returned = list(step(*args))
        for position, stand_in in unavailable.items():
            returned.insert(position, stand_in)
        return tuple(returned)

    return run if unavailable else step
