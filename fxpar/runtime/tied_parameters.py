"""Parameters that several stages use: the first owns them, and lends them to the others once per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port
from fxpar.resharding.pipeline import Crossing
from fxpar.runtime.edge_transport import StageWay
from fxpar.runtime.gradients import Gradient
from fxpar.transport.local_transport import HandOver
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Loan:
    """One parameter on loan from its owner's ranks to those of other stages, seen from one of them.

    `layout` is how its owner stores it, in `dtype`. `there` takes it to all borrowers. `back` are the ways of gradients
    that this rank returns or gets: a borrower has one, if it has a gradient, and the owner has those of all borrowers.
    """

    name: str
    layout: Layout
    dtype: torch.dtype
    is_borrower: bool
    there: StageWay | HandOver
    back: tuple[StageWay | HandOver, ...]


class Lending:
    """The loans that this rank takes part in, in the same order on all ranks."""

    def __init__(self, loans: Sequence[Loan]) -> None:
        self._loans = loans

    @classmethod
    def of(cls, ways: Sequence[tuple[Crossing, StageWay | HandOver]], mesh: Mesh) -> Lending:
        """What this rank lends and borrows, by the ways that parameters and their gradients cross."""
        pipe = mesh.coordinate["pipe"]
        back: defaultdict[Port, list[StageWay | HandOver]] = defaultdict(list)
        for crossing, way in ways:
            if crossing.is_gradient:
                back[crossing.port].append(way)
        there = [(crossing, way) for crossing, way in ways if not crossing.is_gradient]
        return cls(
            [
                Loan(c.port.name, c.source_layout, c.dtype, pipe != c.source_pipe, way, tuple(back[c.port]))
                for c, way in there
            ]
        )

    @property
    def names(self) -> set[str]:
        """The parameters that this rank lends or borrows."""
        return {loan.name for loan in self._loans}

    def settled(self, own: Mapping[str, Gradient], mesh: Mesh) -> list[Gradient]:
        """What `settle` leaves of gradients that are `own` at first, by name; in the order of their names."""
        returned = {loan.name for loan in self._loans if loan.is_borrower and loan.back}
        received = {
            loan.name: Gradient.of(loan.name, loan.layout, loan.dtype, mesh)
            for loan in self._loans
            if loan.back and not loan.is_borrower
        }
        left = {name: gradient for name, gradient in own.items() if name not in returned} | received
        return [left[name] for name in sorted(left)]

    def exchange(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hand out what is lent; the borrowed pieces by name.

        Raises:
            PeerLostError: another rank died.
        """
        posted = [(loan, loan.there.post_receive(0)) for loan in self._loans if loan.is_borrower]
        sent = [(loan, loan.there.send(parameters[loan.name], 0)) for loan in self._loans if not loan.is_borrower]
        borrowed = {loan.name: loan.there.wait(receipt) for loan, receipt in posted}
        for loan, shipment in sent:
            loan.there.complete(shipment)
        return borrowed

    def settle(self, gradients: dict[str, Tensor]) -> None:
        """Give gradients of what was borrowed back to the owner, who adds them to its own; none is partial any more.

        Raises:
            PeerLostError: another rank died.
        """
        returning = [(loan, way) for loan in self._loans for way in loan.back]
        posted = [(loan, way, way.post_receive(0)) for loan, way in returning if not loan.is_borrower]
        sent = [(way, way.send(gradients.pop(loan.name), 0)) for loan, way in returning if loan.is_borrower]
        for loan, way, receipt in posted:
            received, own = way.wait(receipt), gradients.get(loan.name)
            gradients[loan.name] = received if own is None else own + received
        for way, shipment in sent:
            way.complete(shipment)

    def finish(self) -> None:
        """Wait until all that this rank passes on to other borrowers has left.

        Raises:
            PeerLostError: another rank died.
        """
        for loan in self._loans:
            for way in (loan.there, *loan.back):
                way.finish()
