"""What ranks do to move values between two stages; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.layout import Layout
from fxpar.mesh import Mesh, init_mesh
from fxpar.runtime.transport import Piece, Route, complete_all
from fxpar.tiles import shard_of
from tests.runtime.toy_pipeline import as_columns


@dataclass(frozen=True, slots=True)
class Move:
    """A value of some dtype, from one layout to another; in column order on either side, if so said."""

    source: Layout
    target: Layout
    dtype: torch.dtype = torch.float32
    columns: tuple[bool, bool] = (False, False)


def whole_value(move: Move, microbatch: int, batch_shard: int = 0) -> Tensor:
    """The logical value, different for every microbatch and batch shard."""
    generator = torch.Generator().manual_seed(10 * microbatch + batch_shard)
    return torch.randint(0, 100, move.source.shape, generator=generator).to(move.dtype)


def carry_out(moves: Sequence[Move], sizes: dict[str, int], microbatches: int) -> list[list[Tensor]]:
    """Each move of each microbatch from pipe index 0 to 1, sent in another order than it is received in."""
    mesh = init_mesh(**sizes)
    routes = [
        Route(f"move {i}", i, mesh, (0, move.source), (1, move.target), microbatches) for i, move in enumerate(moves)
    ]
    if mesh.coordinate["pipe"] == 1:
        return _receive(moves, routes, mesh, microbatches)
    shipments = []
    for microbatch in reversed(range(microbatches)):
        for move, route in reversed(list(zip(moves, routes, strict=True))):
            value = whole_value(move, microbatch, mesh.coordinate["data"])
            piece = shard_of(value, move.source, mesh.coordinate)
            shipments += route.send(as_columns(piece) if move.columns[0] else piece, microbatch)
    complete_all(shipments)
    return []


def _receive(moves: Sequence[Move], routes: Sequence[Route], mesh: Mesh, microbatches: int) -> list[list[Tensor]]:
    received = []
    for move, route in zip(moves, routes, strict=True):
        like = torch.empty(move.target.local_shape(mesh.coordinate), dtype=move.dtype)
        piece = Piece.like(as_columns(like) if move.columns[1] else like)
        receipts = [route.post_receive(piece, microbatch) for microbatch in range(microbatches)]
        received.append([route.wait(receipt) for receipt in receipts])
    return received


def send_another_shape() -> str:
    """Rank 0 sends a piece that is not the planned one; gives its complaint."""
    mesh = init_mesh(pipe=2)
    layout = Layout((4, 2))
    route = Route("the toy", 1, mesh, (0, layout), (1, layout), 1)
    if mesh.rank == 1:
        return ""
    try:
        route.send(torch.zeros(2, 4), 0)
    except AssertionError as error:
        return str(error)
    return "sent"


def lose_the_sender() -> str:
    """Rank 0 leaves while rank 1 waits for it; gives the latter's error."""
    mesh = init_mesh(pipe=2)
    layout = Layout((4,))
    route = Route("the value of edge toy", 1, mesh, (0, layout), (1, layout), 1)
    receipt = route.post_receive(Piece.like(torch.empty(4)), 0) if mesh.rank == 1 else None
    dist.barrier()
    if receipt is None:
        dist.destroy_process_group()
        return ""
    try:
        route.wait(receipt)
    except PeerLostError as error:
        return str(error)
    return "received"
