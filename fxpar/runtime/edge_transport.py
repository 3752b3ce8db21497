"""One rank's end of the route of a value between stages: it moves the rank's batch shard, into pooled memory."""

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
from fxpar.transport.routes import RouteSpec, open_routes
from fxpar.world.mesh import Mesh

_FIRST_TAG = 0
"""Steps of one world use the same tags: no message of one is in flight when the next begins."""


class EdgeTransport:
    """A `route` whose dim 0 is the batch shards, one index for each; pieces here are without that dim.

    Args:
        piece: shape and strides of what this rank receives; None if it only sends.
        buffers: the pool that received pieces are allocated from.
        sends_and_receives: whether this rank both sends and receives, and may need part of what it holds itself.
    """

    def __init__(
        self, route: Route, piece: Piece | None, buffers: Buffers, *, sends_and_receives: bool = False
    ) -> None:
        self._route, self._piece, self._buffers, self._sends_and_receives = route, piece, buffers, sends_and_receives
        self._awaited: dict[int, Tensor] = {}
        self._receipts: dict[int, Any] = {}

    def send(self, value: Tensor, microbatch: int) -> Any:
        """Begin to send this rank's piece, which must not change before `complete` was called with the result.

        With `sends_and_receives`, the receive of the microbatch must have been posted.
        """
        piece = value.unsqueeze(0)
        if not self._sends_and_receives:
            return self._route.send(piece, microbatch)
        into = self._awaited.pop(microbatch)
        shipment, self._receipts[microbatch] = self._route.exchange(piece, into, microbatch)
        return shipment

    def post_receive(self, microbatch: int) -> Any:
        """Begin to receive this rank's piece; pass the result to `wait`."""
        assert self._piece is not None, "this rank receives nothing"
        piece = self._piece.over(self._buffers.take(self._piece.num_bytes)).unsqueeze(0)
        if not self._sends_and_receives:
            return self._route.post_receive(piece, microbatch)
        self._awaited[microbatch] = piece
        return microbatch

    def wait(self, receipt: Any) -> Tensor:
        """This rank's piece, once it has arrived.

        Raises:
            PeerLostError: a sender has died, or took too long.
        """
        return self._route.wait(self._receipts.pop(receipt) if self._sends_and_receives else receipt).squeeze(0)

    def complete(self, shipment: Any) -> None:
        """Wait until the next ranks have all of a shipment.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._route.complete(shipment)

    def finish(self) -> None:
        """Wait until all that this rank forwards to others is sent.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._route.finish()

    def forget(self) -> None:
        """Drop the state that a failed step has left."""
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
        microbatches: how many a step has; tied parameters and their gradients move once per step.
        piece_of: returns the shape and strides in which this rank receives a value.
        timeout: how long one message may take.
        answered: as in `RelaySetup`, for what moves once per microbatch; tied parameters are always answered.
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
            transports.append((crossing, EdgeTransport(route, piece, buffers, sends_and_receives=sends and receives)))
    return transports


def _move(reshard: Reshard, mesh: Mesh, microbatches: int, answered: bool) -> RouteSpec:
    crossing, at = reshard.crossing, mesh.coordinate
    held = crossing.held(mesh, at) if at["pipe"] == crossing.source_pipe else None
    needed = crossing.needed(mesh, at) if at["pipe"] in crossing.target_pipes else None
    endpoint = Endpoint(crossing.name, mesh.rank, held, needed, crossing.dtype)
    # Of several target stages, one may post its receives long after another: a sender must not wait for one of them.
    in_order = len(crossing.target_pipes) == 1
    if crossing.is_of_parameter:
        return RouteSpec(reshard.plan, endpoint, 1, in_order)
    return RouteSpec(reshard.plan, endpoint, microbatches, in_order, answered)
