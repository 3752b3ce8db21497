"""What ranks do to move values between stages; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError, ReshardError
from fxpar.hardware.network import LOOPBACK
from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port, PortKind
from fxpar.ir.tiles import shard_of
from fxpar.resharding.pipeline import Crossing
from fxpar.runtime.edge_transport import EdgeTransport, open_edge_transports
from fxpar.transport.buffers import Buffers, Piece
from fxpar.transport.local_transport import LocalTransport
from fxpar.world.mesh import Mesh, init_mesh
from tests.runtime.toy_stages import as_columns
from tests.support.move_tensors import live_on


@dataclass(frozen=True, slots=True)
class Move:
    """A value of stage 0, and how it shall lie on each later stage; in column order there or here, if so said."""

    source: Layout
    targets: tuple[Layout, ...]
    dtype: torch.dtype = torch.float32
    columns: tuple[bool, bool] = (False, False)


def whole_value(move: Move, microbatch: int, batch_shard: int = 0) -> Tensor:
    """The logical value, different for every microbatch and batch shard."""
    generator = torch.Generator().manual_seed(10 * microbatch + batch_shard)
    return torch.randint(0, 100, move.source.shape, generator=generator).to(move.dtype)


def carry_out(
    moves: Sequence[Move], sizes: dict[str, int], hosts: Sequence[int], microbatches: int, strategy: str
) -> list[list[Tensor]]:
    """Each move of each microbatch; the moves are sent in another order than they are received in."""
    live_on(hosts[dist.get_rank()])
    mesh = init_mesh(**sizes)
    transports = open_transports(moves, mesh, microbatches, strategy)
    if mesh.coordinate["pipe"] > 0:
        received = []
        for transport in transports:
            receipts = [transport.post_receive(microbatch) for microbatch in range(microbatches)]
            received.append([transport.wait(receipt) for receipt in receipts])
        for transport in transports:
            transport.finish()
        return received
    sent = []
    for microbatch in range(microbatches):
        for move, transport in reversed(list(zip(moves, transports, strict=True))):
            value = whole_value(move, microbatch, mesh.coordinate["data"])
            piece = shard_of(value, move.source, mesh.coordinate)
            sent.append((transport, transport.send(as_columns(piece) if move.columns[0] else piece, microbatch)))
    for transport, shipment in sent:
        transport.complete(shipment)
    return []


def open_transports(
    moves: Sequence[Move], mesh: Mesh, microbatches: int, strategy: str = "broadcast", timeout_s: float = 30
) -> list[EdgeTransport | LocalTransport]:
    """The transports of all moves, which every rank takes part in."""
    reshards, by_name = [], {}
    for number, move in enumerate(moves):
        port, targets = Port(PortKind.EDGE, f"toy {number}"), tuple(range(1, 1 + len(move.targets)))
        crossing = Crossing(port, False, 0, targets, move.source, move.targets, move.dtype)
        reshards.append(crossing.planned(mesh, LOOPBACK, strategy))
        by_name[crossing.name] = move

    def piece_of(crossing: Crossing) -> Piece:
        layout = crossing.target_layouts[mesh.coordinate["pipe"] - 1]
        like = torch.empty(layout.local_shape(mesh.coordinate), dtype=crossing.dtype)
        return Piece.like(as_columns(like) if by_name[crossing.name].columns[1] else like)

    buffers, timeout = Buffers(torch.device("cpu")), timedelta(seconds=timeout_s)
    return [
        transport for _, transport in open_edge_transports(reshards, mesh, microbatches, piece_of, buffers, timeout)
    ]


def send_another_piece(piece: Tensor) -> str:
    """Rank 0 sends a piece that is not the planned one; returns its complaint."""
    mesh = init_mesh(pipe=2)
    (transport,) = open_transports([Move(Layout((4, 2)), (Layout((4, 2)),))], mesh, 1)
    if mesh.rank == 1:
        return ""
    try:
        transport.send(piece, 0)
    except ReshardError as error:
        return str(error)
    return "sent"


def lose_the_sender(hosts: Sequence[int]) -> str:
    """Rank 0 leaves while rank 1 waits for it; returns the latter's error."""
    live_on(hosts[dist.get_rank()])
    mesh = init_mesh(pipe=2)
    (transport,) = open_transports([Move(Layout((4,)), (Layout((4,)),))], mesh, 1, timeout_s=1)
    receipt = transport.post_receive(0) if mesh.rank == 1 else None
    dist.barrier()
    if receipt is None:
        dist.destroy_process_group()
        return ""
    try:
        transport.wait(receipt)
    except PeerLostError as error:
        return str(error)
    return "received"
