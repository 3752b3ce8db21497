"""Results of the forward on ranks that hold no part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxpar._torch.distributed import as_dtensor_subclass
from fxpar.errors import RemoteResultError


def _refuse(tensor: RemoteResult, *unused_args: Any, **unused: Any) -> Any:
    """Raise RemoteResultError."""
    raise tensor._error()


_refused: Any = _refuse  # Any, because it replaces methods of many signatures
_METADATA_OPS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class RemoteResult(DTensor):
    """A DTensor on the ranks of another stage: this rank knows its shape, dtype, mesh and placements, but no values.

    `fxpar.reshard` accepts it like any other. Ops on it, and methods that read values, raise RemoteResultError.
    """

    _name: str
    to_local = full_tensor = redistribute = backward = _refused
    numpy = tolist = item = __array__ = __float__ = __int__ = __bool__ = __index__ = __complex__ = _refused

    @classmethod
    def of(cls, tensor: DTensor, name: str) -> RemoteResult:
        """`tensor`, of which this rank holds no part, as a RemoteResult; error messages call it `name`."""
        remote = as_dtensor_subclass(cls, tensor)
        remote._name = name
        return remote

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as of DTensor
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA_OPS:
            return cls.of(args[0], args[0]._name)
        values = [*args, *(kwargs or {}).values()]
        given = [value for entry in values for value in (entry if isinstance(entry, list | tuple) else (entry,))]
        raise next(value for value in given if isinstance(value, RemoteResult))._error()

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._error()
        return repr(self)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]  # as of DTensor
        return f"RemoteResult({self._error()})"

    def _error(self) -> RemoteResultError:
        return RemoteResultError(self._name, self.device_mesh.mesh.flatten().tolist())
