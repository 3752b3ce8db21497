"""Receive what a rank needs of a value, and forward it along the relays that the rank is part of."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.resharding.plan import Relay
from fxpar.transport.channel import Arrival, ChannelMessage
from fxpar.transport.packing import Landing
from fxpar.transport.relay_setup import RelaySetup
from fxpar.transport.route_messages import ANSWER, Shipment, chunks
from fxpar.transport.worker import Worker


@dataclass(slots=True)
class _Inflow:
    """A relay that this rank receives over the network into `memory`, by the receives `posted` with `tag`.

    Other ranks of this host read it from `message`.
    """

    number: int
    relay: Relay
    landing: Landing
    memory: Tensor
    message: ChannelMessage | None
    tag: int
    posted: Sequence[dist.Work]


@dataclass(slots=True)
class Receipt:
    """The handle of a receive that has been posted."""

    value: Tensor
    microbatch: int
    landings: dict[int, Landing] = field(default_factory=dict)
    inflows: list[_Inflow] = field(default_factory=list)
    arrivals: list[tuple[Relay, Arrival]] = field(default_factory=list)
    passing: Shipment = field(default_factory=Shipment)
    passed_on: Future[None] | None = None


class RelayReceiver:
    """One rank's receives of one value, and what it forwards."""

    def __init__(self, setup: RelaySetup) -> None:
        plan, endpoint, order = setup.plan, setup.endpoint, setup.order
        self._plan, self._endpoint, self._buffers, self._messages = plan, endpoint, setup.buffers, setup.messages
        self._writers, self._readers = setup.channels.writers, setup.channels.readers
        self._order, self._answered = order, setup.answered
        rank, numbered = endpoint.rank, list(enumerate(plan.relays))
        self._passed = [(number, relay) for number, relay in numbered if rank in relay.path[1:]]
        self._read = [(number, relay) for number, relay in numbered if any(rank in group for group in relay.readers)]
        self._passes_on = any(
            relay.path[-1] != rank or number in self._writers or order.concern(number) for number, relay in self._passed
        )
        self._worker = Worker(f"pass on {endpoint.name}")
        self._passed_on: list[Shipment] = []

    def post(self, value: Tensor, microbatch: int) -> Receipt:
        """See `Route.post_receive`.

        Raises:
            PeerLostError: a sender has died.
        """
        receipt = Receipt(value, microbatch)
        for number, relay in self._read:
            receipt.arrivals.append((relay, self._readers[number].receive(relay.num_elements * value.itemsize)))
        for number, relay in self._passed:
            receipt.inflows.append(self._post(number, relay, receipt))
        self._passed_on.append(receipt.passing)
        if self._passes_on:
            receipt.passed_on = self._worker.submit(lambda: self._receive(receipt))
        return receipt

    def wait(self, receipt: Receipt) -> Tensor:
        """See `Route.wait`.

        Raises:
            PeerLostError: a sender has died, or took too long.
        """
        if receipt.passed_on is None:
            self._receive(receipt)
        else:
            receipt.passed_on.result()
        for relay, arrival in receipt.arrivals:
            memory = arrival.wait(arrival.num_bytes, self._messages.timeout.total_seconds())
            self._landing(receipt, relay).deliver(relay, memory)
            arrival.release()
        return receipt.value

    def finish(self) -> None:
        """See `Route.finish`.

        Raises:
            PeerLostError: a receiver has died, or took too long.
        """
        passed_on, self._passed_on = self._passed_on, []
        for shipment in passed_on:
            self._messages.complete_shipment(shipment)

    def _landing(self, receipt: Receipt, relay: Relay) -> Landing:
        if relay.task not in receipt.landings:
            task, needed = self._plan.tasks[relay.task], self._endpoint.tile_to_receive()
            receipt.landings[relay.task] = Landing(task, needed, receipt.value, self._buffers)
        return receipt.landings[relay.task]

    def _post(self, number: int, relay: Relay, receipt: Receipt) -> _Inflow:
        landing = self._landing(receipt, relay)
        message = None
        if number in self._writers:
            message = self._writers[number].begin(relay.num_elements * receipt.value.itemsize)
        memory, (previous, following) = landing.memory(relay), _neighbours(relay, self._endpoint.rank)
        if following is not None and self._answered:
            onward = self._messages.tag_of(receipt.microbatch, passed_on=True)
            answer = self._messages.expect_answer(following, onward + self._messages.num_tags)
            receipt.passing.acknowledged.append(answer)
        tag = self._messages.tag_of(receipt.microbatch, passed_on=previous != relay.path[0])
        posted = [self._messages.receive(chunk, previous, tag) for chunk in chunks(memory, relay.num_chunks)]
        return _Inflow(number, relay, landing, memory, message, tag, posted)

    def _receive(self, receipt: Receipt) -> None:
        """Receive and forward all relays; if that fails, tell the readers on this host that the rest will not come."""
        try:
            for inflow in receipt.inflows:
                self._receive_one(inflow, receipt)
        except PeerLostError:
            for inflow in receipt.inflows:
                if inflow.message is not None:
                    inflow.message.fail()
            raise

    def _receive_one(self, inflow: _Inflow, receipt: Receipt) -> None:
        messages, passing = self._messages, receipt.passing
        onward = messages.tag_of(receipt.microbatch, passed_on=True)
        previous, following = _neighbours(inflow.relay, self._endpoint.rank)
        arrived, next_may_send_at = 0, self._order.bytes_until_next(inflow.number, len(inflow.memory))
        for work, chunk in zip(inflow.posted, chunks(inflow.memory, inflow.relay.num_chunks), strict=True):
            messages.complete(work, previous)
            if following is not None:
                messages.send(passing, chunk, following, onward)
            if inflow.message is not None:
                # A copy, because the readers may release theirs before it is sent to the next host.
                inflow.message.buffer[arrived : arrived + len(chunk)].copy_(chunk)
                inflow.message.publish(arrived + len(chunk))
            arrived += len(chunk)
            if next_may_send_at is not None and arrived >= next_may_send_at and previous == inflow.relay.path[0]:
                messages.send(passing, ANSWER, previous, messages.order_tag(receipt.microbatch))
                next_may_send_at = None
        if self._answered:
            messages.send(passing, ANSWER, previous, inflow.tag + messages.num_tags)
        inflow.landing.deliver(inflow.relay, inflow.memory)


def _neighbours(relay: Relay, rank: int) -> tuple[int, int | None]:
    """The ranks before and after `rank` on the path of a relay; None after the last."""
    place = relay.path.index(rank)
    return relay.path[place - 1], relay.path[place + 1] if place + 1 < len(relay.path) else None
