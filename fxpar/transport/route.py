"""What every transport offers: the route of one value from those who hold it to those who need it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Route(Protocol):
    """Carries one value per microbatch, many at a time; they arrive in the order in which they were sent.

    What `send` and `post_receive` give is of no concern to the caller: it goes back to `complete`, and to `wait`.
    """

    def send(self, value: Tensor, microbatch: int) -> Any:
        """Begin to send this rank's piece, which must not change before all is complete."""

    def post_receive(self, value: Tensor, microbatch: int) -> Any:
        """Begin to receive this rank's piece into `value`, whose memory nobody else may use until it is there."""

    def wait(self, receipt: Any) -> Tensor:
        """This rank's piece, once it has arrived."""

    def exchange(self, value: Tensor, into: Tensor, microbatch: int) -> tuple[Any, Any]:
        """Both, on a rank that holds some and needs some, with what it keeps: what `send` and `post_receive` give."""

    def complete(self, shipment: Any) -> None:
        """Wait until the next ranks have all of a shipment."""

    def finish(self) -> None:
        """Wait until all that this rank passes on to others has left."""
