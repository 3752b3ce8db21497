"""Execute a resharding plan: chunks are forwarded from host to host as messages, and shared in memory inside hosts.

Receives are posted ahead. A thread forwards chunks concurrently with the computation.
"""

from __future__ import annotations

from torch import Tensor

from fxpar.transport.relay_receiver import Receipt, RelayReceiver
from fxpar.transport.relay_sender import RelaySender
from fxpar.transport.relay_setup import RelaySetup
from fxpar.transport.route_messages import Shipment


class RelayRoute:
    """The route of one value to the ranks that need it; every rank makes it with the same plan.

    A route carries one value per microbatch; several may be in flight, and arrive in the order in which they were sent.
    """

    def __init__(self, setup: RelaySetup) -> None:
        self._setup, self._sender, self._receiver = setup, RelaySender(setup), RelayReceiver(setup)

    def send(self, value: Tensor, microbatch: int) -> Shipment:
        """Begin to send this rank's piece, which must not change before `complete`.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype; nothing is sent.
        """
        return self._sender.send(value, microbatch)

    def post_receive(self, value: Tensor, microbatch: int) -> Receipt:
        """Begin to receive this rank's piece into `value`, which nothing else may use until `wait` returns.

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
        """Begin to send this rank's piece and to receive another, and copy the part that this rank has already.

        Raises:
            ReshardError: as in `send`.
            PeerLostError: a sender has died.
        """
        receipt = self.post_receive(into, microbatch)  # first: gloo is twice as fast where receives are posted
        shipment = self.send(value, microbatch)
        self._setup.endpoint.copy_local_part(self._setup.plan, value, into, self._setup.buffers)
        return shipment, receipt

    def complete(self, shipment: Shipment) -> None:
        """Wait until the next ranks have all of `shipment`.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._setup.messages.complete_shipment(shipment)

    def finish(self) -> None:
        """Wait until all that this rank forwards to others is sent.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._receiver.finish()
