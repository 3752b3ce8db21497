"""Steps in which the host never waits for what its device computes: on a GPU, receives are posted there meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.runtime.executor import Executor

aten = torch.ops.aten
_LOOKING = (
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten._unique2,
)
"""Ops that give the host a number, or a tensor whose shape it must know."""


class HostWaitError(AssertionError):
    """The host has looked at a value, or made a process group, amid a step."""


class Unlooked(TorchDispatchMode):
    """Inside, ops that the host waits for fail."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _LOOKING:
            raise HostWaitError(f"{func} amid a step waits for the device")
        return func(*args, **(kwargs or {}))


def forbid_host_waits() -> None:
    """From here on, in this process, every step that waits for its device fails."""
    run = Executor.run

    def watched(self: Executor, *args: Any, **kwargs: Any) -> Any:
        with Unlooked(), _forbidden("new_group", "all_gather_object", "barrier"):
            return run(self, *args, **kwargs)

    Executor.run = watched  # type: ignore[method-assign]


@contextmanager
def _forbidden(*names: str) -> Iterator[None]:
    """Inside, functions of torch.distributed fail by which the host waits for other ranks."""
    with ExitStack() as restored:
        for name in names:
            restored.enter_context(patch.object(dist, name, side_effect=HostWaitError(f"{name} amid a step")))
        yield
