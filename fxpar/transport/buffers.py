"""Memory for what is under way, used again as soon as nobody holds it, so that steps allocate nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from fxpar._torch import is_shared


@dataclass(frozen=True, slots=True)
class Piece:
    """How a rank's piece of a value lies in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Piece:
        """The memory of a real or fake tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def num_bytes(self) -> int:
        """What one takes; a piece of strides larger than its shape needs has gaps."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def over(self, memory: Tensor) -> Tensor:
        """The piece in `memory`, bytes."""
        return memory[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)

    def empty(self) -> Tensor:
        """New memory for one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Buffers:
    """Byte buffers of one device. A buffer is free again when no tensor but the pool's own views its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._by_size: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._lock = Lock()

    def take(self, num_bytes: int) -> Tensor:
        """`num_bytes` bytes that nobody else holds, with whatever is in them."""
        with self._lock:  # between looking whether a buffer is free and holding it
            buffers = self._by_size[num_bytes]
            for buffer in buffers:
                if not is_shared(buffer):
                    return buffer[:]
            # Not empty: what a signal does not fill must not be numbers that processors are slow at.
            buffers.append(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))
            return buffers[-1][:]

    @property
    def num_bytes(self) -> int:
        """All that was ever allocated."""
        return sum(size * len(buffers) for size, buffers in self._by_size.items())
