"""The memory in which a scattered product is stored, of all ranks in one process."""

from __future__ import annotations

import torch

from fxpar.lowering.triton.launch import Destinations, counters_of, places_of
from fxpar.lowering.triton.pieces import Pieces
from tests.lowering.triton.kernel_inputs import SMALL, no_tickets


class Owners:
    """The memory of all ranks, which holds no numbers, with guards around the pieces; counters are for tiles `SMALL`.

    memory: (owner, rank that stores, rows of a piece and a guard, columns). counters: (owner, tiles).
    """

    def __init__(self, pieces: Pieces, rows_of_piece: int, columns: int, dtype: torch.dtype) -> None:
        self.pieces = pieces
        self.memory = torch.full((pieces.parts, pieces.parts, rows_of_piece + 1, columns), torch.nan, dtype=dtype)
        self.counters = torch.zeros(pieces.parts, counters_of(pieces, 1024, SMALL), dtype=torch.int32)

    def destinations(self, rank: int, strides: tuple[int, int]) -> Destinations:
        """Where `rank` stores what it has computed."""
        pieces = (self.memory[owner, rank].data_ptr() for owner in range(self.pieces.parts))
        places = torch.tensor(places_of(pieces, self.memory))
        counters = torch.tensor([counters.data_ptr() for counters in self.counters])
        return Destinations(self.memory, places, counters, self.pieces, rank, strides, no_tickets())
