"""Connect the stages: open this rank's transports of all values that cross between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor

from fxpar.ir.stage import CompiledStage, Port
from fxpar.resharding.pipeline import Crossing, Reshard
from fxpar.runtime.edge_transport import EdgeTransport, open_edge_transports
from fxpar.runtime.tied_parameters import TiedParameters
from fxpar.transport.buffers import Buffers, Piece
from fxpar.transport.local_transport import LocalTransport
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Connections:
    """A rank's transports to and from other stages.

    traffic: transports by edge, source and target stages: of the edge's value if the source computes it, of its
        gradient if the source reads it.
    tied: parameters of this rank that other stages use, too.
    buffers: the pool from which received values are allocated.
    """

    traffic: Mapping[tuple[str, int, tuple[int, ...]], EdgeTransport | LocalTransport]
    tied: TiedParameters
    buffers: Buffers

    @property
    def without_gradients(self) -> Connections:
        """The same transports for a forward-only program."""
        return replace(self, tied=self.tied.without_gradients)


def connect(
    reshards: Sequence[Reshard],
    own: Sequence[CompiledStage],
    mesh: Mesh,
    microbatches: int,
    timeout: timedelta,
    *,
    answered: bool = True,
) -> Connections:
    """The connections of this rank's `own` stages; a collective of all ranks, with the same `reshards`.

    Args:
        timeout: how long one message may take.
        answered: as in `RelaySetup`. A step with a loss needs no answers: in the end all ranks wait for the loss.
    """
    buffers = Buffers(torch.device(mesh.device_type))

    def piece_of(crossing: Crossing) -> Piece:
        return _piece(crossing, own, mesh)

    transports = open_edge_transports(reshards, mesh, microbatches, piece_of, buffers, timeout, answered=answered)
    traffic = {(c.port.name, c.source, c.targets): transport for c, transport in transports if not c.is_of_parameter}
    tied = TiedParameters.of(
        [(crossing, transport) for crossing, transport in transports if crossing.is_of_parameter], mesh
    )
    return Connections(traffic, tied, buffers)


def _piece(crossing: Crossing, own: Sequence[CompiledStage], mesh: Mesh) -> Piece:
    """The shape and strides in which this rank receives: those that its first stage that uses it was compiled for."""
    expected: dict[Port, Tensor] = {}
    for stage in own:
        if stage.index not in crossing.targets:
            continue
        if crossing.is_gradient and not crossing.is_of_parameter:
            expected |= dict(zip(stage.tangents, stage.tangent_pieces, strict=True))
        else:
            expected = stage.held_pieces | expected
    _, *shape = crossing.needed(mesh, mesh.coordinate).shape
    if crossing.port not in expected:  # the gradient of a tied parameter that its owner stores but does not use
        return Piece.like(torch.empty(shape, dtype=crossing.dtype, device=mesh.device_type))
    piece = Piece.like(expected[crossing.port])
    if crossing.is_gradient and crossing.is_of_parameter:  # the gradient may have another dtype than the parameter
        piece = replace(piece, dtype=crossing.dtype)
    planned = f"{tuple(shape)} and {crossing.dtype}"
    assert f"{piece.shape} and {piece.dtype}" == planned, f"{crossing.name}: {planned} are planned, not {piece}"
    return piece
