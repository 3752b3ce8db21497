"""What a relay route needs on each rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpar.resharding.plan import ReshardPlan
from fxpar.transport.buffers import Buffers
from fxpar.transport.channel import ChannelReader, ChannelWriter
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.route_messages import RouteMessages
from fxpar.transport.send_order import SendOrder


@dataclass(frozen=True, slots=True)
class RouteChannels:
    """By relay, the channel in which this rank writes for others of its host, and the one that it reads.

    In the order channel of a relay, its sender tells other ranks of its host that they may send.
    """

    writers: dict[int, ChannelWriter] = field(default_factory=dict)
    readers: dict[int, ChannelReader] = field(default_factory=dict)
    order_writers: dict[int, ChannelWriter] = field(default_factory=dict)
    order_readers: dict[int, ChannelReader] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RelaySetup:
    """What the sender and the receiver of one route share.

    plan: the same on every rank.
    endpoint: the tiles that this rank holds and needs.
    channels: to and from other ranks of this host, through shared memory.
    buffers: the pool for the memory of messages.
    messages: the value's messages between hosts.
    order: the send order, where the ranks of a host send to several peers one after another. They wait for each other,
        so it must be empty if one peer may post its receive long after another.
    answered: whether receivers acknowledge that they have everything. If not, the caller must know by other means that
        a send has arrived before it calls `complete`: gloo does not notice that a peer has died while it writes.
    """

    plan: ReshardPlan
    endpoint: Endpoint
    channels: RouteChannels
    buffers: Buffers
    messages: RouteMessages
    order: SendOrder
    answered: bool
