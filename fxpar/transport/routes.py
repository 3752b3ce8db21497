"""Open the routes of all values that a program moves, in one call: their channels are opened by one collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from fxpar.resharding.plan import ReshardPlan
from fxpar.transport.buffers import Buffers
from fxpar.transport.channel import ChannelRequest, Channels, open_channels
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.group_route import GroupRoute
from fxpar.transport.relay_route import RelayRoute
from fxpar.transport.relay_setup import RelaySetup, RouteChannels
from fxpar.transport.route import Route
from fxpar.transport.route_messages import TAG_KINDS, RouteMessages
from fxpar.transport.send_order import SendOrder
from fxpar.transport.sender_groups import connect_senders
from fxpar.world.mesh import moves_in_groups


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """A value that moves once per microbatch, by a plan that is the same on every rank; `endpoint` is this rank's.

    The names of endpoints are unique. `in_order` is whether `RelaySetup.order` is used; `answered` is that of
    `RelaySetup`.
    """

    plan: ReshardPlan
    endpoint: Endpoint
    microbatches: int = 1
    in_order: bool = True
    answered: bool = True


def open_routes(moves: Sequence[RouteSpec], buffers: Buffers, first_tag: int, timeout: timedelta) -> Sequence[Route]:
    """The routes of `moves`; a collective of all ranks, with the same moves in the same order.

    Args:
        buffers: the pool of the device that values are on.
        first_tag: the first tag of messages; each microbatch of each move takes `TAG_KINDS` tags.
        timeout: how long one message may take.
    """
    if moves_in_groups(buffers.device.type):
        groups = connect_senders([move.plan for move in moves], timeout, buffers.device)
        return [GroupRoute(move.plan, move.endpoint, groups, buffers) for move in moves]
    order = [SendOrder.of(move.plan) if move.in_order else SendOrder({}) for move in moves]
    requests = [(*_requests(move), *_order_requests(move, own)) for move, own in zip(moves, order, strict=True)]
    channels = open_channels([request for asked in requests for _, request in asked])
    routes, tag = [], first_tag
    for move, own in zip(moves, order, strict=True):
        opened = _channels(move, own, channels)
        messages = RouteMessages(move.endpoint.name, tag, move.microbatches, timeout)
        routes.append(RelayRoute(RelaySetup(move.plan, move.endpoint, opened, buffers, messages, own, move.answered)))
        tag += TAG_KINDS * move.microbatches
    return routes


def _requests(move: RouteSpec) -> Iterator[tuple[int, ChannelRequest]]:
    """For each relay, the channels in which its leaders write for other ranks of their hosts."""
    for number, relay in enumerate(move.plan.relays):
        for writer, readers in zip(relay.path, relay.readers, strict=True):
            if readers:
                yield (
                    number,
                    ChannelRequest(f"relay {number} of {move.endpoint.name} from rank {writer}", writer, readers),
                )


def _order_requests(move: RouteSpec, order: SendOrder) -> Iterator[tuple[int, ChannelRequest]]:
    """For each relay that other ranks of its host wait for, the channel in which its sender tells them."""
    relays = move.plan.relays
    for number in sorted(set(order.before.values())):
        sender = relays[number].path[0]
        waiting = {relays[later].path[0] for later in order.after(number)} - {sender}
        if waiting:
            name = f"the order after relay {number} of {move.endpoint.name}"
            yield number, ChannelRequest(name, sender, tuple(sorted(waiting)))


def _channels(move: RouteSpec, order: SendOrder, channels: Channels) -> RouteChannels:
    """This rank's channels of a move: at most one per relay, and at most one order channel."""
    found = RouteChannels()
    for requests, writers, readers in (
        (_requests(move), found.writers, found.readers),
        (_order_requests(move, order), found.order_writers, found.order_readers),
    ):
        for number, request in requests:
            if request.name in channels.writers:
                writers[number] = channels.writers[request.name]
            if request.name in channels.readers:
                readers[number] = channels.readers[request.name]
    return found
