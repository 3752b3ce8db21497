"""Connect the stages: this rank's transports of all that crosses between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """What a rank exchanges with other stages.

    traffic: by edge, source and target stages, what this rank moves it with: the edge's value if the source makes it,
        its gradient if the source reads it.
    tied: parameters of this rank that other stages use, too.
    buffers: the memory into which all of that arrives.
    """

    traffic: Mapping[tuple[str, int, tuple[int, ...]], EdgeTransport | LocalTransport]
    tied: TiedParameters
    buffers: Buffers


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
        answered: as of `RelaySetup`. A step with a loss needs no answers: in the end all ranks wait for it.
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
    """How what this rank receives lies in its memory: as its first stage that uses it was compiled for."""
    expected: dict[Port, Tensor] = {}
    for stage in own:
        if stage.index not in crossing.targets:
            continue
        if crossing.is_gradient and not crossing.is_of_parameter:
            expected |= dict(zip(stage.tangents, stage.tangent_pieces, strict=True))
        else:
            expected = stage.held_pieces | expected
    _, *shape = crossing.needed(mesh, mesh.coordinate).shape
    if crossing.port not in expected:  # the gradient of a parameter that its owner lends but does not use
        return Piece.like(torch.empty(shape, dtype=crossing.dtype, device=mesh.device_type))
    piece = Piece.like(expected[crossing.port])
    planned = f"{tuple(shape)} and {crossing.dtype}"
    assert f"{piece.shape} and {piece.dtype}" == planned, f"{crossing.name}: {planned} are planned, not {piece}"
    return piece
