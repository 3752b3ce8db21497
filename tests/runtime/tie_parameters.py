"""What ranks do with tied parameters; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.hardware.network import LOOPBACK
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import Port, PortKind
from fxpar.ir.tiles import shard_of
from fxpar.resharding.pipeline import Crossing
from fxpar.runtime.edge_transport import EdgeTransport, open_edge_transports
from fxpar.runtime.tied_parameters import TiedParameters
from fxpar.transport.buffers import Buffers, Piece
from fxpar.transport.local_transport import LocalTransport
from fxpar.world.mesh import Mesh, init_mesh
from tests.support.move_tensors import live_on

NAMES = ("used by all", "frozen", "without gradient at its owner")
WHOLE = Layout((4, 3))


def owned_layout(mesh: Mesh) -> Layout:
    """Columns, uneven where there are two."""
    return WHOLE.with_placement("x", Shard(1, mesh.x)) if mesh.x > 1 else WHOLE


def whole_parameter(name: str) -> Tensor:
    return torch.arange(12.0).view(4, 3) + 100 * NAMES.index(name)


def gradient(stage: int) -> float:
    """What each stage has as gradient of every element."""
    return 10.0**stage


def share(sizes: dict[str, int], ranks_per_host: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stage 0 owns all, in columns, and the others use them whole: what is received, and the final gradients."""
    live_on(dist.get_rank() // ranks_per_host)
    mesh = init_mesh(**sizes)
    stage = mesh.coordinate["pipe"]
    layout = owned_layout(mesh)
    owned = {name: shard_of(whole_parameter(name), layout, mesh.coordinate) for name in NAMES} if stage == 0 else {}
    tied = TiedParameters.of(_transports(mesh), mesh)
    received = tied.exchange(owned)
    gradients = {name: torch.full_like(piece, gradient(stage)) for name, piece in {**owned, **received}.items()}
    del gradients["frozen"]
    if stage == 0:
        del gradients["without gradient at its owner"]
    tied.reduce(gradients)
    tied.finish()
    return received, gradients


def _transports(mesh: Mesh) -> list[tuple[Crossing, EdgeTransport | LocalTransport]]:
    """Each parameter to all later stages, and but for the frozen one a gradient from each of them."""
    users, owned = tuple(range(1, mesh.pipe)), owned_layout(mesh)
    crossings = []
    for name in NAMES:
        port = Port(PortKind.PARAMETER, name)
        crossings.append(Crossing(port, False, 0, users, owned, (WHOLE,) * len(users), torch.float32))
        returned = [Crossing(port, True, stage, (0,), WHOLE, (owned,), torch.float32) for stage in users]
        crossings += returned if name != "frozen" else []

    def piece_of(crossing: Crossing) -> Piece:
        layout = owned if crossing.is_gradient else WHOLE
        return Piece.like(torch.empty(layout.local_shape(mesh.coordinate)))

    reshards = [crossing.planned(mesh, LOOPBACK) for crossing in crossings]
    return open_edge_transports(reshards, mesh, 1, piece_of, Buffers(torch.device("cpu")), timedelta(seconds=30))
