"""Send what a rank holds of a value along the relays that start at it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxpar.resharding.plan import Relay
from fxpar.transport.packing import pack, packed_relays
from fxpar.transport.relay_setup import RelaySetup
from fxpar.transport.route_messages import Shipment, chunks
from fxpar.transport.worker import Worker


class RelaySender:
    """One rank's sends of one value."""

    def __init__(self, setup: RelaySetup) -> None:
        plan, endpoint, order = setup.plan, setup.endpoint, setup.order
        self._plan, self._endpoint, self._buffers, self._messages = plan, endpoint, setup.buffers, setup.messages
        self._writers, self._answered, self._order = setup.channels.writers, setup.answered, order
        self._order_writers, self._order_readers = setup.channels.order_writers, setup.channels.order_readers
        own = [(number, relay) for number, relay in enumerate(plan.relays) if relay.path[0] == endpoint.rank]
        self._published = [(number, relay) for number, relay in own if relay.readers[0]]
        self._sent = [(number, relay) for number, relay in own if relay.num_hops]
        self._sends_in_order = any(order.concern(number) for number, _ in self._sent)
        self._worker = Worker(f"send {endpoint.name}")

    def send(self, value: Tensor, microbatch: int) -> Shipment:
        """See `Route.send`.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype; nothing is sent.
        """
        held = self._endpoint.tile_to_send(value)
        for number, relay in self._published:
            task = self._plan.tasks[relay.task]
            message = self._writers[number].begin(relay.num_elements * value.itemsize)
            if relay.num_elements == task.num_elements:
                pack(value, held, task.region, message.buffer)
            else:
                message.buffer.copy_(packed_relays([relay], self._plan.tasks, value, held, self._buffers)[0])
            message.publish(len(message.buffer))
        shipment, tag = Shipment(), self._messages.tag_of(microbatch, passed_on=False)
        if not self._sent:
            return shipment
        for number, relay in self._sent:
            if self._answered:
                shipment.acknowledged.append(self._messages.expect_answer(relay.path[1], tag + self._messages.num_tags))
            if self._order.after(number):
                order_tag = self._messages.order_tag(microbatch)
                shipment.order[number] = self._messages.expect_answer(relay.path[1], order_tag)
        memories = packed_relays([relay for _, relay in self._sent], self._plan.tasks, value, held, self._buffers)
        loads = [(*sent, memory) for sent, memory in zip(self._sent, memories, strict=True)]
        if self._sends_in_order:
            shipment.shipped = self._worker.submit(lambda: self._ship_in_order(loads, tag, shipment))
        else:
            self._ship(loads, tag, shipment)
        return shipment

    def _ship(self, loads: Sequence[tuple[int, Relay, Tensor]], tag: int, shipment: Shipment) -> None:
        for _, relay, memory in loads:
            for chunk in chunks(memory, relay.num_chunks):
                self._messages.send(shipment, chunk, relay.path[1], tag)

    def _ship_in_order(self, loads: Sequence[tuple[int, Relay, Tensor]], tag: int, shipment: Shipment) -> None:
        """Send each relay after the relays before it in the host's send order have arrived, or nearly so.

        This cannot deadlock: before a rank waits for the relay of another, it has reported its own earlier ones.
        """
        heard: set[int] = set()
        for load in loads:
            earlier = self._order.before.get(load[0])
            if earlier is not None:
                self._tell_next(shipment, earlier)
                if earlier in self._order_readers and earlier not in heard:
                    heard.add(earlier)
                    arrival = self._order_readers[earlier].receive(1)
                    arrival.wait(1, self._messages.timeout.total_seconds())
                    arrival.release()
            self._ship([load], tag, shipment)
        self._tell_next(shipment, len(self._plan.relays))

    def _tell_next(self, shipment: Shipment, last: int) -> None:
        """Wait until this rank's relays up to number `last` have arrived, and tell the ranks that wait for them."""
        for number in [number for number in shipment.order if number <= last]:
            work, peer, _ = shipment.order.pop(number)
            self._messages.complete(work, peer)
            if number in self._order_writers:
                self._order_writers[number].begin(1).publish(1)
