"""What ranks do to lend parameters; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.layout import Layout, Shard
from fxpar.mesh import Mesh, init_mesh
from fxpar.runtime.lending import Lending, Loan
from fxpar.runtime.transport import Piece, Route
from fxpar.tiles import shard_of

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


def lend(sizes: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stage 0 owns all, in columns, and the others borrow them whole: what is borrowed, and the final gradients."""
    mesh = init_mesh(**sizes)
    stage = mesh.coordinate["pipe"]
    layout = owned_layout(mesh)
    owned = {name: shard_of(whole_parameter(name), layout, mesh.coordinate) for name in NAMES} if stage == 0 else {}
    lending = Lending(_loans(mesh, stage))
    borrowed = lending.exchange(owned)
    gradients = {name: torch.full_like(piece, gradient(stage)) for name, piece in {**owned, **borrowed}.items()}
    del gradients["frozen"]
    if stage == 0:
        del gradients["without gradient at its owner"]
    lending.settle(gradients)
    return borrowed, gradients


def _loans(mesh: Mesh, stage: int) -> list[Loan]:
    loans = []
    for borrower in range(1, mesh.pipe):
        for position, name in enumerate(NAMES):
            tag = 2 * (borrower * len(NAMES) + position)
            ends = (0, owned_layout(mesh)), (borrower, WHOLE)
            there = Route(name, tag, mesh, ends[0], ends[1], 1)
            back = None if name == "frozen" else Route(name, tag + 1, mesh, ends[1], ends[0], 1)
            if stage in (0, borrower):
                _, layout = ends[0 if stage == 0 else 1]
                piece = Piece.like(torch.empty(layout.local_shape(mesh.coordinate)))
                loans.append(Loan(name, piece, stage == borrower, there, back))
    return loans
