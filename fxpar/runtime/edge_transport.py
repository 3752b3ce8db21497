"""The route of a value as one rank of a stage takes it: its batch shard's slice, into memory that is used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from fxpar.resharding.pipeline import Crossing, Reshard
from fxpar.transport.buffers import Buffers, Piece
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.local_transport import LocalTransport
from fxpar.transport.route import Route
from fxpar.transport.routes import Move, open_routes
from fxpar.world.mesh import Mesh

_FIRST_TAG = 0
"""Steps of one world use the same tags: no message of one is under way when the next begins."""


class EdgeTransport:
    """A `route` that moves what all batch shards have, each a slice of its dim 0, which pieces come without.

    Args:
        piece: how what this rank receives lies in its memory; None if it only sends.
        buffers: where that memory comes from.
        keeps: whether this rank both sends and receives, and may need what it holds itself.
    """

    def __init__(self, route: Route, piece: Piece | None, buffers: Buffers, *, keeps: bool = False) -> None:
        self._route, self._piece, self._buffers, self._keeps = route, piece, buffers, keeps
        self._awaited: dict[int, Tensor] = {}
        self._receipts: dict[int, Any] = {}

    def send(self, value: Tensor, microbatch: int) -> Any:
        """Begin to send this rank's piece, which must not change before `complete` of what this returns.

        A rank that keeps some of it has posted its receive.
        """
        piece = value.unsqueeze(0)
        if not self._keeps:
            return self._route.send(piece, microbatch)
        into = self._awaited.pop(microbatch)
        shipment, self._receipts[microbatch] = self._route.exchange(piece, into, microbatch)
        return shipment

    def post_receive(self, microbatch: int) -> Any:
        """Begin to receive this rank's piece; `wait` for what this returns."""
        assert self._piece is not None, "this rank receives nothing"
        piece = self._piece.over(self._buffers.take(self._piece.num_bytes)).unsqueeze(0)
        if not self._keeps:
            return self._route.post_receive(piece, microbatch)
        self._awaited[microbatch] = piece
        return microbatch

    def wait(self, receipt: Any) -> Tensor:
        """This rank's piece, once it has arrived.

        Raises:
            PeerLostError: a sender has died, or took too long.
        """
        return self._route.wait(self._receipts.pop(receipt) if self._keeps else receipt).squeeze(0)

    def complete(self, shipment: Any) -> None:
        """Wait until the next ranks have all of a shipment.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._route.complete(shipment)

    def finish(self) -> None:
        """Wait until all that this rank passes on to others has left.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._route.finish()

    def forget(self) -> None:
        """Keep nothing of a step that failed."""
        self._awaited.clear()
        self._receipts.clear()


def open_edge_transports(
    reshards: Sequence[Reshard],
    mesh: Mesh,
    microbatches: int,
    piece_of: Callable[[Crossing], Piece],
    buffers: Buffers,
    timeout: timedelta,
    *,
    answered: bool = True,
) -> list[tuple[Crossing, EdgeTransport | LocalTransport]]:
    """The transports of this rank; a collective of all ranks, with the same `reshards` in the same order.

    Args:
        microbatches: how many of them a step has; tied parameters and their gradients move once per step.
        piece_of: how what this rank receives shall lie in its memory.
        timeout: how long one message may take.
        answered: as of `RelaySetup`, of what moves for each microbatch; tied parameters always are.
    """
    pipe = mesh.coordinate["pipe"]
    transports: list[tuple[Crossing, EdgeTransport | LocalTransport]] = [
        (reshard.crossing, LocalTransport(piece_of(reshard.crossing)))
        for reshard in reshards
        if reshard.crossing.is_local and reshard.crossing.source_pipe == pipe
    ]
    moving = [reshard for reshard in reshards if not reshard.crossing.is_local]
    if not moving:
        return transports
    routes = open_routes(
        [_move(reshard, mesh, microbatches, answered) for reshard in moving], buffers, _FIRST_TAG, timeout
    )
    for crossing, route in zip([reshard.crossing for reshard in moving], routes, strict=True):
        sends, receives = pipe == crossing.source_pipe, pipe in crossing.target_pipes
        if sends or receives:
            piece = piece_of(crossing) if receives else None
            transports.append((crossing, EdgeTransport(route, piece, buffers, keeps=sends and receives)))
    return transports


def _move(reshard: Reshard, mesh: Mesh, microbatches: int, answered: bool) -> Move:
    crossing, at = reshard.crossing, mesh.coordinate
    held = crossing.held(mesh, at) if at["pipe"] == crossing.source_pipe else None
    needed = crossing.needed(mesh, at) if at["pipe"] in crossing.target_pipes else None
    side = Endpoint(crossing.name, mesh.rank, held, needed, crossing.dtype)
    # A stage may ask for its microbatches long after another: who sends to both must not wait for one of them.
    in_order = len(crossing.target_pipes) == 1
    if crossing.is_of_parameter:
        return Move(reshard.plan, side, 1, in_order)
    return Move(reshard.plan, side, microbatches, in_order, answered)
