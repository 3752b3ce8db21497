"""The protocol of routes: a route moves one value from the ranks that hold it to the ranks that need it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Route(Protocol):
    """Carries one value per microbatch; several may be in flight, and arrive in the order in which they were sent.

    The results of `send` and `post_receive` are opaque handles, for `complete` and for `wait`.
    """

    def send(self, value: Tensor, microbatch: int) -> Any:
        """Begin to send this rank's piece, which must not change before `complete`."""

    def post_receive(self, value: Tensor, microbatch: int) -> Any:
        """Begin to receive this rank's piece into `value`, which nothing else may use until `wait` returns."""

    def wait(self, receipt: Any) -> Tensor:
        """This rank's piece, once it has arrived."""

    def exchange(self, value: Tensor, into: Tensor, microbatch: int) -> tuple[Any, Any]:
        """Send and post a receive, on a rank that does both, and copy the part that it has already; both handles."""

    def complete(self, shipment: Any) -> None:
        """Wait until the next ranks have all of a shipment."""

    def finish(self) -> None:
        """Wait until all that this rank forwards to others is sent."""
