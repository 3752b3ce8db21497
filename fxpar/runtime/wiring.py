"""Connect the stages: this rank's ways of all that crosses between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from fxpar.ir.stage import CompiledStage, Port
from fxpar.resharding.pipeline import Crossing, Reshard
from fxpar.runtime.edge_transport import StageWay, open_stage_ways
from fxpar.runtime.tied_parameters import Lending
from fxpar.transport.buffers import Buffers, Piece
from fxpar.transport.local_transport import HandOver
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Connections:
    """What a rank exchanges with other stages.

    traffic: the way of an edge from a stage to others, of those that this rank takes part in: its value's if the stage
        makes it, a gradient's if the stage reads it.
    lending: parameters that this rank lends to others, or borrows.
    buffers: the memory into which all of that arrives.
    """

    traffic: Mapping[tuple[str, int, tuple[int, ...]], StageWay | HandOver]
    lending: Lending
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
        answered: as of `Route`. A step with a loss needs no answers: in the end all ranks wait for it.
    """
    buffers = Buffers(torch.device(mesh.device_type))

    def piece_of(crossing: Crossing) -> Piece:
        return _piece(crossing, own, mesh)

    ways = open_stage_ways(reshards, mesh, microbatches, piece_of, buffers, timeout, answered=answered)
    traffic = {(c.port.name, c.source, c.targets): way for c, way in ways if not c.is_of_parameter}
    lending = Lending.of([(crossing, way) for crossing, way in ways if crossing.is_of_parameter], mesh)
    return Connections(traffic, lending, buffers)


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
