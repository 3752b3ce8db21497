"""The variants of a fused op on a GPU: one kernel, several beside copies, or a collective and a matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpar._torch.distributed import reserved_processors
from fxpar.lowering.triton.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Fused:
    """One kernel that overlaps its matmul with the communication.

    segment_rows: the rows that are copied and signalled at a time; unused in a scatter, which stores tiles.
    pushes: whether each rank copies its shard into the memory of the others; otherwise each rank copies from them.
    """

    tiling: Tiling
    segment_rows: int = 0
    pushes: bool = False

    def programs(self, device: torch.device) -> int:
        """The number of programs that run concurrently; on CPUs, Triton's interpreter runs them one after another.

        A program holds its multiprocessor until no tiles are left. So a kernel of NCCL that sends to another stage
        would start late, unless PyTorch was told how many multiprocessors to leave to such kernels.
        """
        if device.type == "cpu":
            return self.tiling.programs
        processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        return max(1, processors - reserved_processors()) * self.tiling.programs


@dataclass(frozen=True, slots=True)
class Pipelined:
    """PyTorch's own fused op: the library's matmul in as many parts as there are ranks, each beside other copies."""


@dataclass(frozen=True, slots=True)
class Unfused:
    """The collective and the library's matmul, one after the other."""


How = Fused | Pipelined | Unfused
