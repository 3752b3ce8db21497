"""Parameters that several stages use: the first owns them, and lends them to the others once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpar.runtime.transport import Piece, Route, complete_all


@dataclass(frozen=True, slots=True)
class Loan:
    """One parameter on loan from its owner's stage to one other, seen from a rank of either of the two.

    There is no way `back` if the borrower has no gradient for it.
    """

    name: str
    piece: Piece
    is_borrower: bool
    there: Route
    back: Route | None


class Lending:
    """The loans that this rank takes part in, in the same order on all ranks."""

    def __init__(self, loans: Sequence[Loan]) -> None:
        self._loans = loans

    def exchange(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hand out what is lent; the borrowed pieces by name."""
        posted = [(loan, loan.there.post_receive(loan.piece, 0)) for loan in self._loans if loan.is_borrower]
        sent = [loan.there.send(parameters[loan.name], 0) for loan in self._loans if not loan.is_borrower]
        borrowed = {loan.name: loan.there.wait(receipt) for loan, receipt in posted}
        for shipments in sent:
            complete_all(shipments)
        return borrowed

    def settle(self, gradients: dict[str, Tensor]) -> None:
        """Give gradients of what was borrowed back to the owner, who adds them to its own; none is partial any more."""
        returning = [(loan, loan.back) for loan in self._loans if loan.back is not None]
        posted = [(loan, way, way.post_receive(loan.piece, 0)) for loan, way in returning if not loan.is_borrower]
        sent = [way.send(gradients.pop(loan.name), 0) for loan, way in returning if loan.is_borrower]
        for loan, way, receipt in posted:
            received, own = way.wait(receipt), gradients.get(loan.name)
            gradients[loan.name] = received if own is None else own + received
        for shipments in sent:
            complete_all(shipments)
