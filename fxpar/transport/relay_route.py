"""Carry out a resharding plan: chunks passed from host to host as messages, memory shared inside hosts.

Receives are posted ahead, and what is passed on to others is passed on by a thread beside the one that computes.
"""

from __future__ import annotations

from torch import Tensor

from fxpar.transport.relay_receiver import Receipt, RelayReceiver
from fxpar.transport.relay_sender import RelaySender
from fxpar.transport.relay_setup import RelaySetup
from fxpar.transport.route_messages import Shipment


class RelayRoute:
    """The route of one value to those who need it; every rank makes it with the same plan, and takes its own part.

    A route carries one value per microbatch, and many at a time; they arrive in the order in which they were sent.
    """

    def __init__(self, setup: RelaySetup) -> None:
        self._setup, self._sender, self._receiver = setup, RelaySender(setup), RelayReceiver(setup)

    def send(self, value: Tensor, microbatch: int) -> Shipment:
        """Begin to send this rank's piece, which must not change before all is complete.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype; nothing is sent.
        """
        return self._sender.send(value, microbatch)

    def post_receive(self, value: Tensor, microbatch: int) -> Receipt:
        """Begin to receive this rank's piece into `value`, whose memory nobody else may use until it is there.

        Raises:
            PeerLostError: a sender has died.
        """
        return self._receiver.post(value, microbatch)

    def wait(self, receipt: Receipt) -> Tensor:
        """This rank's piece, once it has arrived.

        Raises:
            PeerLostError: a sender has died, or took too long.
        """
        return self._receiver.wait(receipt)

    def exchange(self, value: Tensor, into: Tensor, microbatch: int) -> tuple[Shipment, Receipt]:
        """Begin to send this rank's piece and to receive another, with what this rank keeps.

        Raises:
            ReshardError: as of `send`.
            PeerLostError: a sender has died.
        """
        receipt = self.post_receive(into, microbatch)  # first: gloo is twice as fast where receives are posted
        shipment = self.send(value, microbatch)
        self._setup.endpoint.keep(self._setup.plan, value, into, self._setup.buffers)
        return shipment, receipt

    def complete(self, shipment: Shipment) -> None:
        """Wait until the next ranks have all of `shipment`.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._setup.messages.complete_shipment(shipment)

    def finish(self) -> None:
        """Wait until all that this rank passes on to others has left.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._receiver.finish()
