"""Parameters that several stages use: the first owns them, and lends them to the others once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fxpar.runtime.transport import Piece, Route


@dataclass(frozen=True, slots=True)
class Loan:
    """One parameter on loan from its owner's stage to one other, seen from a rank of either of the two."""

    name: str
    piece: Piece
    is_borrower: bool
    there: Route
    back: Route


class Lending:
    """The loans that this rank takes part in, in the same order on all ranks."""

    def __init__(self, loans: Sequence[Loan]) -> None:
        self._loans = loans

    def exchange(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hand out what is lent; the borrowed pieces by name."""
        posted = [(loan, loan.there.post_receive(loan.piece, 0)) for loan in self._loans if loan.is_borrower]
        sent = [loan.there.send(parameters[loan.name], 0) for loan in self._loans if not loan.is_borrower]
        borrowed = {loan.name: loan.there.wait(receipt) for loan, receipt in posted}
        _complete(sent)
        return borrowed

    def settle(self, gradients: dict[str, Tensor]) -> None:
        """Give the gradients of what was borrowed back to the owner, who adds them to its own; all are reduced already."""
        posted = [(loan, loan.back.post_receive(loan.piece, 0)) for loan in self._loans if not loan.is_borrower]
        sent = [loan.back.send(gradients.pop(loan.name), 0) for loan in self._loans if loan.is_borrower]
        for loan, receipt in posted:
            gradients[loan.name] = gradients[loan.name] + loan.back.wait(receipt)
        _complete(sent)


def _complete(sent: Sequence[Sequence[tuple[dist.Work, Tensor]]]) -> None:
    for started in sent:
        for work, _ in started:
            work.wait()
