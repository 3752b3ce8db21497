"""How a fused op is computed on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpar.lowering.triton.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Fused:
    """One kernel, which communicates.

    segment_rows: how many rows are sent at once and signalled; of no meaning where tiles are stored with their owners.
    pushes: whether ranks put what they share into the memory of others, rather than that others take it.
    """

    tiling: Tiling
    segment_rows: int = 0
    pushes: bool = False

    def programs(self, device: torch.device) -> int:
        """How many programs run at a time; on CPUs, in Triton's interpreter, one after another."""
        if device.type == "cpu":
            return self.tiling.programs
        processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        return processors * self.tiling.programs


@dataclass(frozen=True, slots=True)
class Unfused:
    """The collective and the library's matmul, one after the other."""


How = Fused | Unfused
