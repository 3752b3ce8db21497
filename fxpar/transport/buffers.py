"""A pool of buffers for messages, reused once no tensor views them, so that steps after the first allocate none."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from fxpar._torch.compiler import is_shared


@dataclass(frozen=True, slots=True)
class Piece:
    """Shape, strides, dtype and device of a rank's piece of a value."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Piece:
        """That of a real or fake tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def num_bytes(self) -> int:
        """The bytes from its first element to its last, with gaps if it is not dense."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def over(self, memory: Tensor) -> Tensor:
        """The piece as a view of the uint8 tensor `memory`."""
        return memory[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)

    def empty(self) -> Tensor:
        """A new, uninitialized tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Buffers:
    """Byte buffers of one device. A buffer is free again when no tensor but the pool's own views its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._by_size: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._lock = Lock()

    def take(self, num_bytes: int) -> Tensor:
        """`num_bytes` bytes that no other tensor views, with any content."""
        with self._lock:  # a buffer that is found free must not be taken twice
            buffers = self._by_size[num_bytes]
            for buffer in buffers:
                if not is_shared(buffer):
                    return buffer[:]
            # Not empty: strategy `signal` leaves most of it unwritten, and subnormal numbers would slow CPUs.
            buffers.append(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))
            return buffers[-1][:]

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers, free or not."""
        return sum(size * len(buffers) for size, buffers in self._by_size.items())
