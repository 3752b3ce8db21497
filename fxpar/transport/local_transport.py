"""The transport between two stages of one rank: the tensor itself is passed on."""

from __future__ import annotations

from torch import Tensor

from fxpar.transport.buffers import Piece


class LocalTransport:
    """Takes the place of an `EdgeTransport` between stages of one rank that have the same layout of a value.

    Args:
        piece: the strides that the receiving stage expects; a value with other strides is copied.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._values: dict[int, Tensor] = {}

    def send(self, value: Tensor, microbatch: int) -> None:
        """Store the value for `wait`."""
        self._values[microbatch] = value

    def post_receive(self, microbatch: int) -> int:
        """The receipt to pass to `wait`."""
        return microbatch

    def wait(self, receipt: int) -> Tensor:
        """The value, with the expected strides."""
        value = self._values.pop(receipt)
        return value if value.stride() == self._piece.stride else self._piece.empty().copy_(value)

    def complete(self, shipment: None) -> None:
        """Do nothing: nothing is in flight."""

    def finish(self) -> None:
        """Do nothing: nothing is forwarded."""

    def forget(self) -> None:
        """Drop the values that a failed step has left."""
        self._values.clear()
