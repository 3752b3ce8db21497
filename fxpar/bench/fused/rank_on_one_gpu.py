"""One rank of many on a machine with one GPU: pinned memory of the host takes the place of other ranks' memory.

The copy engine copies over PCIe, where between GPUs it would use NVLink; the kernels, their order and their signals
are those of a real rank. So this measures how well a kernel hides copies, not the performance of a group of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxpar.lowering.triton.copies import copy_segments, place_own, segments_of_piece
from fxpar.lowering.triton.launch import Arrival, Call, Destinations, gathered_call, places_of, scattered_call
from fxpar.lowering.triton.pieces import Pieces, Segments, ring_from, row_tiles, signals_of_owner
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.stream_signals import await_signal


@dataclass(slots=True)
class GatherOnOneGpu:
    """A product of gathered rows, on rank 0: own (m / parts, k) and right (k, n) on the GPU, the rest on the host."""

    own: Tensor
    remote: list[Tensor]
    right: Tensor
    copies: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream(priority=-1))
    epoch: int = 0
    gathered: Tensor = field(init=False)
    out: Tensor = field(init=False)
    signals: Tensor = field(init=False)
    tickets: Tensor = field(init=False)

    @classmethod
    def random(cls, m: int, n: int, k: int, parts: int, dtype: torch.dtype) -> GatherOnOneGpu:
        """A case with normally distributed values. m is a multiple of `parts`."""
        shards = [torch.randn(m // parts, k, dtype=dtype) for _ in range(parts)]
        right = torch.randn(n, k, dtype=dtype, device="cuda").mT
        return cls(shards[0].cuda(), [shard.pin_memory() for shard in shards[1:]], right)

    def __post_init__(self) -> None:
        rows, k = self.own.shape
        self.gathered = self.own.new_empty((1 + len(self.remote)) * rows, k)
        self.out = self.own.new_empty(len(self.gathered), self.right.shape[1])
        self.signals = torch.zeros(len(self.gathered), dtype=torch.int32, device=self.own.device)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=self.own.device)

    def segments(self, rows: int) -> Segments:
        """Segments of up to `rows` rows."""
        return Segments(Pieces(1, 1 + len(self.remote), len(self.own)), rows)

    def copy(self, segments: Segments) -> None:
        """Let the stream for copies copy all remote rows to the GPU, in ring order, after the current stream's work."""
        self.epoch += 1
        self.copies.wait_stream(torch.cuda.current_stream())
        place_own(self.own, self.gathered, self.signals, segments, 0, self.epoch)
        with torch.cuda.stream(self.copies):
            for rank in ring_from(0, segments.pieces.parts):
                numbers, sources = (
                    list(segments.of_rank(rank)),
                    segments_of_piece(self.remote[rank - 1], segments, rank),
                )
                rows = [segments.row_range(segment) for segment in numbers]
                to = [self.gathered[each.start : each.stop] for each in rows]
                copy_segments(to, sources, [self.signals[number : number + 1] for number in numbers], self.epoch)

    def await_copies(self) -> None:
        """Let the current stream wait until all rows are there."""
        torch.cuda.current_stream().wait_stream(self.copies)

    def multiply(self, how: Fused) -> None:
        """Launch the kernel, which waits for the rows of the latest `copy` (of the same segments) as it needs them."""
        arrival = Arrival(self.signals, self.epoch, self.segments(how.segment_rows), 0, self.tickets)
        call = gathered_call(self.gathered[None], self.right[None], None, self.out[None], arrival, how.tiling)
        call.run(how.programs(self.out.device))

    def fused(self, how: Fused) -> None:
        """Copy and multiply rows at the same time."""
        self.copy(self.segments(how.segment_rows))
        self.multiply(how)

    def library(self) -> None:
        """The product by the library's matmul, without waiting for rows."""
        torch.matmul(self.gathered, self.right, out=self.out)


@dataclass(slots=True)
class ScatterOnOneGpu:
    """A product, left (m, k) by right (k, n), of rank 0: the rows of other owners are copied to the host."""

    left: Tensor
    right: Tensor
    parts: int
    copies: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream(priority=-1))
    counted: list[int] = field(init=False)
    staging: Tensor = field(init=False)
    remote: Tensor = field(init=False)
    counters: Tensor = field(init=False)
    tickets: Tensor = field(init=False)
    pieces: Pieces = field(init=False)

    @classmethod
    def random(cls, m: int, n: int, k: int, parts: int, dtype: torch.dtype) -> ScatterOnOneGpu:
        """A case with normally distributed values. m is a multiple of `parts`, and m * n / parts one of 16."""
        left = torch.randn(m, k, dtype=dtype, device="cuda")
        return cls(left, torch.randn(n, k, dtype=dtype, device="cuda").mT, parts)

    def __post_init__(self) -> None:
        m, n = self.left.shape[0], self.right.shape[1]
        self.pieces = Pieces(1, self.parts, m // self.parts)
        self.staging = self.left.new_empty(self.parts, self.pieces.rows, n)
        self.remote = torch.empty(self.staging.shape, dtype=self.staging.dtype, pin_memory=True)
        self.counters = torch.zeros(self.parts, dtype=torch.int32, device=self.left.device)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=self.left.device)
        self.counted = [0] * self.parts

    def product(self) -> Tensor:
        """The product as it was stored, (m, n)."""
        return self.staging.flatten(0, 1)

    def call(self, how: Fused) -> Call:
        """The kernel, which stores the rows of every owner and signals that on its counter."""
        places = places_of((piece.data_ptr() for piece in self.staging), self.staging)
        counters = [counter.data_ptr() for counter in self.counters]
        where, addresses = (torch.tensor(found, device=self.left.device) for found in (places, counters))
        strides = self.right.shape[1], 1
        to = Destinations(self.staging, where, addresses, self.pieces, 0, strides, self.tickets, one_counter=True)
        return scattered_call(self.left[None], self.right[None], None, to, how.tiling)

    def multiply(self, call: Call, how: Fused) -> None:
        """Launch the kernel, and record the values that its counters will have at its end."""
        call.run(how.programs(self.left.device))
        tiles = list(row_tiles(1, self.left.shape[0], how.tiling.m))
        columns = -(-self.right.shape[1] // how.tiling.n)
        for owner in range(self.parts):
            self.counted[owner] += sum(signals_of_owner(tiles, self.pieces, owner, how.tiling.m)) * columns

    def copy(self) -> None:
        """Let the stream for copies copy the rows of each owner once they are signalled, in the order of tiles."""
        with torch.cuda.stream(self.copies):
            for owner in ring_from(0, self.parts):
                await_signal(self.counters[owner : owner + 1], self.counted[owner])
                self.remote[owner].copy_(self.staging[owner], non_blocking=True)

    def fused(self, call: Call, how: Fused) -> None:
        """Multiply and copy rows at the same time."""
        self.copies.wait_stream(torch.cuda.current_stream())
        self.multiply(call, how)
        self.copy()
        torch.cuda.current_stream().wait_stream(self.copies)

    def copies_alone(self) -> None:
        """The copies alone, when all rows have been stored and signalled."""
        self.copies.wait_stream(torch.cuda.current_stream())
        self.copy()
        torch.cuda.current_stream().wait_stream(self.copies)

    def library(self) -> None:
        """The product by the library's matmul."""
        torch.matmul(self.left, self.right, out=self.product())
