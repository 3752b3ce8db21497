"""Where DTensors are pickled, as `torch.save` does; seen in torch 2.11 to 2.13."""

from collections.abc import Callable
from typing import Any, SupportsIndex

from torch.distributed.tensor import DTensor


def call_before_pickling(notice: Callable[[DTensor], None]) -> None:
    """Call `notice` with each DTensor that is about to be pickled. Copies, and distributed checkpoints, pickle none."""
    reduce: Callable[..., Any] = DTensor.__reduce_ex__

    def __reduce_ex__(self: DTensor, protocol: SupportsIndex) -> Any:
        notice(self)
        return reduce(self, protocol)

    DTensor.__reduce_ex__ = __reduce_ex__  # type: ignore[method-assign, assignment]
