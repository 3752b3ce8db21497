"""Carry out a resharding plan: chunks passed from host to host as messages, memory shared inside hosts.

Receives are posted ahead, and what is passed on to others is passed on by a thread beside the one that computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.resharding.plan import Relay, ReshardPlan
from fxpar.transport.buffers import Buffers
from fxpar.transport.channel import Arrival, ChannelReader, ChannelWriter, Message
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.packing import Landing, pack, packed_relays
from fxpar.transport.send_order import SendOrder
from fxpar.transport.worker import Worker

TAG_KINDS = 5
"""A microbatch has a tag for what is sent, one for what is passed on, one for the answers to each, one for order."""

_ANSWER = torch.zeros(1, dtype=torch.uint8)
"""What a rank sends back that has received all of a relay, or so much that the next has its turn."""


def complete(work: dist.Work, name: str, peer: int | None = None, timeout: timedelta | None = None) -> None:
    """Wait for `work`, which moves `name` from or to `peer`, or among all.

    Raises:
        PeerLostError: a rank that takes part has died, or took longer than `timeout`.
    """
    try:
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        raise PeerLostError(name, peer, str(error)) from error


@dataclass(frozen=True, slots=True)
class RouteChannels:
    """By relay, the channel in which this rank lets others of its host read, and the one in which it reads.

    In the channel of a relay's turn, its sender tells others of its host that theirs has come.
    """

    writers: dict[int, ChannelWriter] = field(default_factory=dict)
    readers: dict[int, ChannelReader] = field(default_factory=dict)
    order_writers: dict[int, ChannelWriter] = field(default_factory=dict)
    order_readers: dict[int, ChannelReader] = field(default_factory=dict)


@dataclass(slots=True)
class _Inflow:
    """A relay that this rank receives over the network into `memory`, by messages that are `posted` with a `tag`.

    In `message`, others of this host read it.
    """

    number: int
    relay: Relay
    landing: Landing
    memory: Tensor
    message: Message | None
    tag: int
    posted: Sequence[dist.Work]


@dataclass(slots=True)
class Shipment:
    """A send that has begun; it keeps alive what is being sent.

    `acknowledged` are receives of what peers answer when they have all of it. When a peer dies, gloo lets receives
    fail at once, but not what it was writing. `order` are receives of what peers answer, by relay, when the next may
    have its turn.
    """

    acknowledged: deque[tuple[dist.Work, int, Tensor]] = field(default_factory=deque)
    order: dict[int, tuple[dist.Work, int, Tensor]] = field(default_factory=dict)
    works: deque[tuple[dist.Work, int, Tensor]] = field(default_factory=deque)
    handed_over: Future[None] | None = None


@dataclass(slots=True)
class Receipt:
    """A receive that has been posted."""

    value: Tensor
    microbatch: int
    landings: dict[int, Landing] = field(default_factory=dict)
    inflows: list[_Inflow] = field(default_factory=list)
    arrivals: list[tuple[Relay, Arrival]] = field(default_factory=list)
    passing: Shipment = field(default_factory=Shipment)
    passed_on: Future[None] | None = None


class RelayRoute:
    """The way of one value to those who need it; every rank makes it with the same plan, and takes its own part.

    A route carries one value per microbatch, and many at a time; they arrive in the order in which they were sent.

    Args:
        plan: made alike on every rank.
        endpoint: this rank's part of the value.
        channels: through the memory of this host.
        tag: of the first microbatch's messages; `TAG_KINDS` times `num_tags` from there on are this route's own.
        timeout: how long one message may take.
        order: whose turn it is, where the ranks of a host serve several peers one after another, as planned. For that
            they wait for each other, so it must not be where one peer may post its receive long after another.
        answered: whether receivers answer when they have all. If not, what was sent must be known to have arrived
            before it is completed: while gloo writes, it does not notice that a peer has died.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        endpoint: Endpoint,
        channels: RouteChannels,
        buffers: Buffers,
        tag: int,
        num_tags: int,
        timeout: timedelta,
        order: SendOrder,
        *,
        answered: bool = True,
    ) -> None:
        self._plan, self._endpoint, self._name, self._rank = plan, endpoint, endpoint.name, endpoint.rank
        rank = endpoint.rank
        self._answered = answered
        self._writers, self._readers, self._buffers = channels.writers, channels.readers, buffers
        self._order, self._order_writers, self._order_readers = order, channels.order_writers, channels.order_readers
        self._tag, self._num_tags, self._timeout = tag, num_tags, timeout
        numbered = list(enumerate(plan.relays))
        self._published = [(i, relay) for i, relay in numbered if relay.path[0] == rank and relay.readers[0]]
        self._sent = [(i, relay) for i, relay in numbered if relay.path[0] == rank and relay.num_hops]
        self._passed = [(i, relay) for i, relay in numbered if rank in relay.path[1:]]
        self._read = [(i, relay) for i, relay in numbered if any(rank in group for group in relay.readers)]
        self._sends_in_order = any(order.concern(number) for number, _ in self._sent)
        self._passes_on = any(
            relay.path[-1] != rank or number in self._writers or order.concern(number) for number, relay in self._passed
        )
        self._sender, self._passer = Worker(f"send {endpoint.name}"), Worker(f"pass on {endpoint.name}")
        self._passed_on: list[Shipment] = []

    def send(self, value: Tensor, microbatch: int) -> Shipment:
        """Begin to send this rank's piece, which must not change before all is complete.

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
        shipment, tag = Shipment(), self._tag_of(microbatch, passed_on=False)
        if self._sent:
            for number, relay in self._sent:
                if self._answered:
                    shipment.acknowledged.append(self._expect(relay.path[1], tag + self._num_tags))
                if self._order.after(number):
                    shipment.order[number] = self._expect(relay.path[1], self._order_tag(microbatch))
            relays = [relay for _, relay in self._sent]
            memories = packed_relays(relays, self._plan.tasks, value, held, self._buffers)
            loads = [(*sent, memory) for sent, memory in zip(self._sent, memories, strict=True)]
            if self._sends_in_order:
                shipment.handed_over = self._sender.submit(lambda: self._ship_in_order(loads, tag, shipment))
            else:
                self._ship(loads, tag, shipment)
        return shipment

    def post_receive(self, value: Tensor, microbatch: int) -> Receipt:
        """Begin to receive this rank's piece into `value`, whose memory nobody else may use until it is there.

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
            receipt.passed_on = self._passer.submit(lambda: self._take_in(receipt))
        return receipt

    def wait(self, receipt: Receipt) -> Tensor:
        """This rank's piece, once it has arrived.

        Raises:
            PeerLostError: a sender has died, or took too long.
        """
        if receipt.passed_on is None:
            self._take_in(receipt)
        else:
            receipt.passed_on.result()
        for relay, arrival in receipt.arrivals:
            memory = arrival.wait(arrival.num_bytes, self._timeout.total_seconds())
            self._landing(receipt, relay).deliver(relay, memory)
            arrival.release()
        return receipt.value

    def exchange(self, value: Tensor, into: Tensor, microbatch: int) -> tuple[Shipment, Receipt]:
        """Begin to send this rank's piece and to receive another, with what this rank keeps.

        Raises:
            ReshardError: as of `send`.
            PeerLostError: a sender has died.
        """
        receipt = self.post_receive(into, microbatch)  # first: gloo is twice as fast where receives are posted
        shipment = self.send(value, microbatch)
        self._endpoint.keep(self._plan, value, into, self._buffers)
        return shipment, receipt

    def complete(self, shipment: Shipment) -> None:
        """Wait until the next ranks have all of `shipment`.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._drain(shipment.acknowledged)
        if shipment.handed_over is not None:
            shipment.handed_over.result()
        self._drain(shipment.works)

    def finish(self) -> None:
        """Wait until all that this rank passes on to others has left.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        passed_on, self._passed_on = self._passed_on, []
        for shipment in passed_on:
            self.complete(shipment)

    def _drain(self, works: deque[tuple[dist.Work, int, Tensor]]) -> None:
        while works:
            work, peer, _ = works.popleft()
            complete(work, self._name, peer, self._timeout)

    def _tag_of(self, microbatch: int, *, passed_on: bool) -> int:
        """The tag of messages; that of their answers is `num_tags` further on.

        A rank passes on what others sent beside its own sends, in no order with them: so these have other tags.
        """
        return self._tag + 2 * passed_on * self._num_tags + microbatch % self._num_tags

    def _order_tag(self, microbatch: int) -> int:
        """The tag by which a peer tells that the next relay has its turn."""
        return self._tag + 4 * self._num_tags + microbatch % self._num_tags

    def _ship(self, loads: Sequence[tuple[int, Relay, Tensor]], tag: int, shipment: Shipment) -> None:
        for _, relay, memory in loads:
            for chunk in _chunks(memory, relay.num_chunks):
                self._begin_send(shipment, chunk, relay.path[1], tag)

    def _ship_in_order(self, loads: Sequence[tuple[int, Relay, Tensor]], tag: int, shipment: Shipment) -> None:
        """Send each relay when all that come before it on this host have arrived, or nearly so.

        Nobody waits in a circle: before a rank waits for another's relay, it has told of its own earlier ones.
        """
        heard: set[int] = set()
        for load in loads:
            earlier = self._order.before.get(load[0])
            if earlier is not None:
                self._tell_next(shipment, earlier)
                if earlier in self._order_readers and earlier not in heard:
                    heard.add(earlier)
                    arrival = self._order_readers[earlier].receive(1)
                    arrival.wait(1, self._timeout.total_seconds())
                    arrival.release()
            self._ship([load], tag, shipment)
        self._tell_next(shipment, len(self._plan.relays))

    def _tell_next(self, shipment: Shipment, last: int) -> None:
        """Wait for this rank's relays up to number `last`, and tell who waits for them on this host."""
        for number in [number for number in shipment.order if number <= last]:
            work, peer, _ = shipment.order.pop(number)
            complete(work, self._name, peer, self._timeout)
            if number in self._order_writers:
                self._order_writers[number].begin(1).publish(1)

    def _expect(self, peer: int, tag: int) -> tuple[dist.Work, int, Tensor]:
        answer = torch.empty(1, dtype=torch.uint8)
        return self._begin(dist.irecv, answer, peer, tag), peer, answer

    def _begin_send(self, shipment: Shipment, chunk: Tensor, peer: int, tag: int) -> None:
        shipment.works.append((self._begin(dist.isend, chunk, peer, tag), peer, chunk))

    def _begin(self, move: Callable[..., dist.Work | None], chunk: Tensor, peer: int, tag: int) -> dist.Work:
        try:
            work = move(chunk, peer, tag=tag)
        except RuntimeError as error:
            raise PeerLostError(self._name, peer, str(error)) from error
        assert work is not None, "this rank belongs to the default group"
        return work

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
        memory, (previous, following) = landing.memory(relay), _neighbours(relay, self._rank)
        if following is not None and self._answered:
            onward = self._tag_of(receipt.microbatch, passed_on=True)
            receipt.passing.acknowledged.append(self._expect(following, onward + self._num_tags))
        tag = self._tag_of(receipt.microbatch, passed_on=previous != relay.path[0])
        posted = [self._begin(dist.irecv, chunk, previous, tag) for chunk in _chunks(memory, relay.num_chunks)]
        return _Inflow(number, relay, landing, memory, message, tag, posted)

    def _take_in(self, receipt: Receipt) -> None:
        """Take what arrives, and pass it on; who reads it here learns when nothing more will come."""
        try:
            for inflow in receipt.inflows:
                self._take_in_one(inflow, receipt)
        except PeerLostError:
            for inflow in receipt.inflows:
                if inflow.message is not None:
                    inflow.message.fail()
            raise

    def _take_in_one(self, inflow: _Inflow, receipt: Receipt) -> None:
        passing, onward = receipt.passing, self._tag_of(receipt.microbatch, passed_on=True)
        previous, following = _neighbours(inflow.relay, self._rank)
        arrived, turn_at = 0, self._order.bytes_until_next(inflow.number, len(inflow.memory))
        for work, chunk in zip(inflow.posted, _chunks(inflow.memory, inflow.relay.num_chunks), strict=True):
            complete(work, self._name, previous, self._timeout)
            if following is not None:
                self._begin_send(passing, chunk, following, onward)
            if inflow.message is not None:
                # A copy, for readers may be done with theirs before it has left for the next host.
                inflow.message.buffer[arrived : arrived + len(chunk)].copy_(chunk)
                inflow.message.publish(arrived + len(chunk))
            arrived += len(chunk)
            if turn_at is not None and arrived >= turn_at and previous == inflow.relay.path[0]:
                self._begin_send(passing, _ANSWER, previous, self._order_tag(receipt.microbatch))
                turn_at = None
        if self._answered:
            self._begin_send(passing, _ANSWER, previous, inflow.tag + self._num_tags)
        inflow.landing.deliver(inflow.relay, inflow.memory)


def _neighbours(relay: Relay, rank: int) -> tuple[int, int | None]:
    """Who sends a relay to `rank`, one of its leaders, and to whom that passes it on."""
    place = relay.path.index(rank)
    return relay.path[place - 1], relay.path[place + 1] if place + 1 < len(relay.path) else None


def _chunks(memory: Tensor, count: int) -> Iterator[Tensor]:
    """`memory`, bytes, in `count` pieces that differ by a byte at most; of few bytes, some are empty."""
    size = len(memory)
    for number in range(count):
        yield memory[size * number // count : size * (number + 1) // count]
