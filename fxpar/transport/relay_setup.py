"""What a relay route is made of, on each rank."""

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
    """By relay, the channel in which this rank lets others of its host read, and the one in which it reads.

    In the order channel of a relay, its sender tells others of its host that their turn has come.
    """

    writers: dict[int, ChannelWriter] = field(default_factory=dict)
    readers: dict[int, ChannelReader] = field(default_factory=dict)
    order_writers: dict[int, ChannelWriter] = field(default_factory=dict)
    order_readers: dict[int, ChannelReader] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RelaySetup:
    """What the sender and the receiver of one route share.

    plan: made alike on every rank.
    endpoint: this rank's part of the value.
    channels: through the memory of this host.
    buffers: where the memory of messages comes from.
    messages: by which the value goes between hosts.
    order: whose turn it is, where the ranks of a host serve several peers one after another, as planned. For that they
        wait for each other, so it must not be where one peer may post its receive long after another.
    answered: whether receivers answer when they have all. If not, what was sent must be known to have arrived before it
        is completed: while gloo writes, it does not notice that a peer has died.
    """

    plan: ReshardPlan
    endpoint: Endpoint
    channels: RouteChannels
    buffers: Buffers
    messages: RouteMessages
    order: SendOrder
    answered: bool = True
