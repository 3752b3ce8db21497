"""Open the ways of all values that a program moves, together: what shared memory needs is agreed upon once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from fxpar.reshard.plan import ReshardPlan
from fxpar.runtime.buffers import Buffers
from fxpar.runtime.channel import ChannelRequest, Channels, open_channels
from fxpar.runtime.group_route import GroupRoute, make_groups
from fxpar.runtime.side import Side
from fxpar.runtime.transport import TAG_KINDS, Route, RouteChannels
from fxpar.runtime.way import Way


@dataclass(frozen=True, slots=True)
class Move:
    """A value that is moved once per microbatch, by a plan that is the same on every rank; `side` is this rank's.

    The names of all sides differ. `in_turn` is as of `Route`.
    """

    plan: ReshardPlan
    side: Side
    microbatches: int = 1
    in_turn: bool = True


def open_routes(moves: Sequence[Move], buffers: Buffers, first_tag: int, timeout: timedelta) -> Sequence[Way]:
    """The routes of `moves`; a collective of all ranks, with the same moves in the same order.

    Args:
        buffers: of the device on which values lie. Between GPUs it is for NCCL to move them.
        first_tag: of the messages; `TAG_KINDS` from there on are taken for each microbatch of each move.
        timeout: how long one message may take.
    """
    if buffers.device.type == "cuda":
        return [GroupRoute(move.plan, move.side, make_groups(move.plan, timeout), buffers) for move in moves]
    channels = open_channels([request for move in moves for _, request in _requests(move)])
    routes, tag = [], first_tag
    for move in moves:
        own = _channels(move, channels)
        tags = tag, move.microbatches
        routes.append(Route(move.plan, move.side, own, buffers, *tags, timeout, move.in_turn))
        tag += TAG_KINDS * move.microbatches
    return routes


def _requests(move: Move) -> Iterator[tuple[int, ChannelRequest]]:
    """For each relay, the channels in which its leaders let others of their hosts read."""
    for number, relay in enumerate(move.plan.relays):
        for writer, readers in zip(relay.path, relay.readers, strict=True):
            if readers:
                yield number, ChannelRequest(f"relay {number} of {move.side.name} from rank {writer}", writer, readers)


def _channels(move: Move, channels: Channels) -> RouteChannels:
    """This rank's channels of a move, by relay: of each relay it has one at most."""
    found = RouteChannels()
    for number, request in _requests(move):
        if request.name in channels.writers:
            found.writers[number] = channels.writers[request.name]
        if request.name in channels.readers:
            found.readers[number] = channels.readers[request.name]
    return found
