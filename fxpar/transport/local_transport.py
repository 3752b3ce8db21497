"""Between stages of one rank, values stay where they are."""

from __future__ import annotations

from torch import Tensor

from fxpar.transport.buffers import Piece


class LocalTransport:
    """Stands where an `EdgeTransport` does, between stages of one rank that hold a value alike.

    Args:
        piece: how the receiving stage expects the value to lie in memory; it is copied only if it lies otherwise.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._values: dict[int, Tensor] = {}

    def send(self, value: Tensor, microbatch: int) -> None:
        """Let `wait` have the value."""
        self._values[microbatch] = value

    def post_receive(self, microbatch: int) -> int:
        """What `wait` knows the value by."""
        return microbatch

    def wait(self, receipt: int) -> Tensor:
        """The value."""
        value = self._values.pop(receipt)
        return value if value.stride() == self._piece.stride else self._piece.empty().copy_(value)

    def complete(self, shipment: None) -> None:
        """Nothing: there is nothing under way."""

    def finish(self) -> None:
        """Nothing: there is no one to pass anything on to."""

    def forget(self) -> None:
        """Let go of what a step that failed has left."""
        self._values.clear()
