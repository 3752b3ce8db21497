"""What ranks do when transfers are timed; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpar.bench.reshard.real import measure_halves
from fxpar.bench.reshard.transfers import Measured, TimedTransfer, numbered, time_transfers
from tests.support.move_tensors import live_on


def measure_on_hosts(ranks_per_host: int, num_bytes: int) -> list[Measured]:
    """Transfers between the halves of ranks that play hosts."""
    live_on(dist.get_rank() // ranks_per_host)
    return measure_halves(torch.device("cpu"), [num_bytes])


def send_wrong_values(transfers: Sequence[TimedTransfer]) -> None:
    """Those who hold something give something else."""
    for transfer in transfers:
        held = transfer.source.get(dist.get_rank())
        if held is not None:
            numbered(transfer.shape, held).add_(1)
    time_transfers(transfers, torch.device("cpu"), lambda: 0.0)
