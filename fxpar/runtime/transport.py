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
from fxpar.reshard.plan import Relay, ReshardPlan
from fxpar.reshard.tile import Tile
from fxpar.runtime.buffers import Buffers
from fxpar.runtime.channel import Arrival, ChannelReader, ChannelWriter, Message
from fxpar.runtime.packing import Landing, pack, packed
from fxpar.runtime.side import Side
from fxpar.runtime.worker import Worker

_WINDOW = 8
"""How many chunks a rank that serves several peers in turn hands to the network before the first has left."""

TAG_KINDS = 4
"""A microbatch has a tag for what is sent, one for what is passed on, and one for the answers to each."""

_ANSWER = torch.zeros(1, dtype=torch.uint8)
"""What a rank sends back that has received all of a relay."""


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
    """By relay, the channel in which this rank lets others of its host read, and the one in which it reads."""

    writers: dict[int, ChannelWriter] = field(default_factory=dict)
    readers: dict[int, ChannelReader] = field(default_factory=dict)


@dataclass(slots=True)
class _Inflow:
    """A relay that this rank receives over the network into `memory`, by messages that are `posted` with a `tag`.

    In `message`, others of this host read it.
    """

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
    fail at once, but not what it was writing.
    """

    acknowledged: deque[tuple[dist.Work, int, Tensor]] = field(default_factory=deque)
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


class Route:
    """The way of one value to those who need it; every rank makes it with the same plan, and takes its own part.

    A route carries one value per microbatch, and many at a time; they arrive in the order in which they were sent.

    Args:
        plan: made alike on every rank.
        side: this rank's part of the value.
        channels: through the memory of this host.
        tag: of the first microbatch's messages; `TAG_KINDS` times `num_tags` from there on are this route's own.
        timeout: how long one message may take.
        in_turn: whether peers are served one after another, as planned. For that someone has to wait in between, so
            it must not be where one peer may post its receive long after another.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        side: Side,
        channels: RouteChannels,
        buffers: Buffers,
        tag: int,
        num_tags: int,
        timeout: timedelta,
        in_turn: bool,
    ) -> None:
        self._plan, self._side, self._name, self._rank = plan, side, side.name, side.rank
        rank = side.rank
        self._writers, self._readers, self._buffers = channels.writers, channels.readers, buffers
        self._tag, self._num_tags, self._timeout = tag, num_tags, timeout
        numbered = list(enumerate(plan.relays))
        self._published = [(i, relay) for i, relay in numbered if relay.path[0] == rank and relay.readers[0]]
        self._sent = [relay for _, relay in numbered if relay.path[0] == rank and relay.num_hops]
        self._passed = [(i, relay) for i, relay in numbered if rank in relay.path[1:]]
        self._read = [(i, relay) for i, relay in numbered if any(rank in group for group in relay.readers)]
        self._serves_in_turn = in_turn and len({relay.path[1] for relay in self._sent}) > 1
        self._passes_on = any(relay.path[-1] != rank or number in self._writers for number, relay in self._passed)
        self._sender, self._passer = Worker(f"send {side.name}"), Worker(f"pass on {side.name}")
        self._passed_on: list[Shipment] = []

    def send(self, value: Tensor, microbatch: int) -> Shipment:
        """Begin to send this rank's piece, which must not change before all is complete.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype; nothing is sent.
        """
        held = self._side.tile_to_send(value)
        for number, relay in self._published:
            task = self._plan.tasks[relay.task]
            message = self._writers[number].begin(task.num_elements * value.itemsize)
            pack(value, held, task.region, message.buffer)
            message.publish(len(message.buffer))
        shipment, tag = Shipment(), self._tag_of(microbatch, passed_on=False)
        if self._sent:
            for relay in self._sent:
                self._expect_answer(shipment, relay.path[1], tag)
            loads = self._loads(value, held)
            if self._serves_in_turn:
                shipment.handed_over = self._sender.submit(lambda: self._ship(loads, tag, shipment, _WINDOW))
            else:
                self._ship(loads, tag, shipment, None)
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

    def keep(self, value: Tensor, receipt: Receipt) -> None:
        """Copy what this rank both holds, in `value`, and needs."""
        self._side.keep(self._plan, value, receipt.value, self._buffers)

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

    def _loads(self, value: Tensor, held: Tile) -> list[tuple[Relay, Tensor]]:
        """The bytes of each relay that starts here, in order."""
        regions: dict[int, Tensor] = {}
        loads = []
        for relay in self._sent:
            if relay.task not in regions:
                regions[relay.task] = packed(value, held, self._plan.tasks[relay.task].region, self._buffers)
            loads.append((relay, regions[relay.task][relay.start * value.itemsize : relay.stop * value.itemsize]))
        return loads

    def _ship(self, loads: Sequence[tuple[Relay, Tensor]], tag: int, shipment: Shipment, window: int | None) -> None:
        for relay, memory in loads:
            for chunk in _chunks(memory, relay.num_chunks):
                if window is not None and len(shipment.works) >= window:
                    work, peer, _ = shipment.works.popleft()
                    complete(work, self._name, peer, self._timeout)
                self._begin_send(shipment, chunk, relay.path[1], tag)

    def _expect_answer(self, shipment: Shipment, peer: int, tag: int) -> None:
        answer = torch.empty(1, dtype=torch.uint8)
        work = self._begin(dist.irecv, answer, peer, tag + self._num_tags)
        shipment.acknowledged.append((work, peer, answer))

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
            task, needed = self._plan.tasks[relay.task], self._side.tile_to_receive()
            receipt.landings[relay.task] = Landing(task, needed, receipt.value, self._buffers)
        return receipt.landings[relay.task]

    def _post(self, number: int, relay: Relay, receipt: Receipt) -> _Inflow:
        landing = self._landing(receipt, relay)
        message = None
        if number in self._writers:
            message = self._writers[number].begin(relay.num_elements * receipt.value.itemsize)
        memory, (previous, following) = landing.memory(relay), _neighbours(relay, self._rank)
        if following is not None:
            self._expect_answer(receipt.passing, following, self._tag_of(receipt.microbatch, passed_on=True))
        tag = self._tag_of(receipt.microbatch, passed_on=previous != relay.path[0])
        posted = [self._begin(dist.irecv, chunk, previous, tag) for chunk in _chunks(memory, relay.num_chunks)]
        return _Inflow(relay, landing, memory, message, tag, posted)

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
        arrived = 0
        for work, chunk in zip(inflow.posted, _chunks(inflow.memory, inflow.relay.num_chunks), strict=True):
            complete(work, self._name, previous, self._timeout)
            if following is not None:
                self._begin_send(passing, chunk, following, onward)
            if inflow.message is not None:
                # A copy, for readers may be done with theirs before it has left for the next host.
                inflow.message.buffer[arrived : arrived + len(chunk)].copy_(chunk)
                inflow.message.publish(arrived + len(chunk))
            arrived += len(chunk)
        self._begin_send(passing, _ANSWER, previous, inflow.tag + self._num_tags)
        inflow.landing.deliver(inflow.relay, inflow.memory)


def _neighbours(relay: Relay, rank: int) -> tuple[int, int | None]:
    """Who gives a relay to `rank`, one of its leaders, and to whom that passes it on."""
    place = relay.path.index(rank)
    return relay.path[place - 1], relay.path[place + 1] if place + 1 < len(relay.path) else None


def _chunks(memory: Tensor, count: int) -> Iterator[Tensor]:
    """`memory`, bytes, in `count` pieces that differ by a byte at most; of few bytes, some are empty."""
    size = len(memory)
    for number in range(count):
        yield memory[size * number // count : size * (number + 1) // count]
