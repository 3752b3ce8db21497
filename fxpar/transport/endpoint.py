"""What one rank sends and receives of a value that moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.errors import ReshardError
from fxpar.resharding.plan import ReshardPlan
from fxpar.resharding.tile import Tile
from fxpar.transport.buffers import Buffers
from fxpar.transport.packing import packed, unpack


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The tile of value `name` that rank `rank` holds, and the tile that it needs; None if there is none."""

    name: str
    rank: int
    held: Tile | None
    needed: Tile | None
    dtype: torch.dtype

    def tile_to_send(self, value: Tensor) -> Tile:
        """The tile that `value` holds, after a check: the transports would send a wrong size without an error.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype.
        """
        planned = None if self.held is None else self.held.shape
        if self.held is None or tuple(value.shape) != planned or value.dtype != self.dtype:
            raise ReshardError(
                f"{self.name}: rank {self.rank} would send a piece of shape {tuple(value.shape)} and {value.dtype}, "
                f"but {planned} and {self.dtype} are planned; nothing was sent"
            )
        return self.held

    def tile_to_receive(self) -> Tile:
        """The tile that this rank needs; it must need one."""
        assert self.needed is not None, f"{self.name}: rank {self.rank} receives nothing"
        return self.needed

    def copy_local_part(self, plan: ReshardPlan, value: Tensor, piece: Tensor, buffers: Buffers) -> None:
        """Copy from `value`, which this rank holds, the parts of `piece` that it needs."""
        held = self.tile_to_send(value)
        for task in plan.tasks:
            if self.rank in task.senders and self.rank in task.receivers:
                memory = packed(value, held, task.region, buffers)
                unpack(memory, self.tile_to_receive(), task.region, piece)
