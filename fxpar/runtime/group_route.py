"""Carry out a resharding plan by collectives: each relay is a broadcast on the group of the ranks that take part.

For NCCL, whose broadcast is a chunked ring of its own, and which moves data inside a host on faster links than shared
memory. Chunks and hops of the plan are left to it; senders, receivers and order are the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from fxpar.resharding.plan import Relay, ReshardPlan
from fxpar.runtime.buffers import Buffers
from fxpar.runtime.packing import Landing, packed_relays
from fxpar.runtime.side import Side
from fxpar.runtime.transport import complete


def make_groups(plan: ReshardPlan, timeout: timedelta) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for every set of ranks that some relay involves; a collective of all ranks.

    Each route has groups of its own: collectives of one group run in one order on all its ranks, which routes of
    opposite directions could not keep.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for members in sorted({_members(relay) for relay in plan.relays}):
        groups[members] = dist.new_group(list(members), timeout=timeout)
    return groups


@dataclass(slots=True)
class GroupReceipt:
    """A receive that has begun."""

    value: Tensor
    landings: dict[int, Landing] = field(default_factory=dict)
    arriving: list[tuple[Relay, Tensor, dist.Work]] = field(default_factory=list)


@dataclass(slots=True)
class GroupShipment:
    """A send that has begun; it keeps alive what is being sent."""

    works: list[tuple[dist.Work, Tensor]] = field(default_factory=list)


class GroupRoute:
    """As `Route`, with `groups` in place of messages and shared memory."""

    def __init__(
        self,
        plan: ReshardPlan,
        side: Side,
        groups: dict[tuple[int, ...], dist.ProcessGroup],
        buffers: Buffers,
    ) -> None:
        self._plan, self._side, rank = plan, side, side.rank
        self._groups, self._buffers = groups, buffers
        self._sent = [relay for relay in plan.relays if relay.path[0] == rank]
        self._received = [relay for relay in plan.relays if rank in _members(relay) and relay.path[0] != rank]

    def send(self, value: Tensor, microbatch: int) -> GroupShipment:
        """Begin to send this rank's piece, which must not change before all is complete.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype; nothing is sent.
        """
        held = self._side.tile_to_send(value)
        shipment = GroupShipment()
        memories = packed_relays(self._sent, self._plan.tasks, value, held, self._buffers)
        for relay, memory in zip(self._sent, memories, strict=True):
            shipment.works.append((self._broadcast(memory, relay), memory))
        return shipment

    def post_receive(self, value: Tensor, microbatch: int) -> GroupReceipt:
        """Begin to receive this rank's piece into `value`, whose memory nobody else may use until it is there."""
        receipt = GroupReceipt(value)
        for relay in self._received:
            if relay.task not in receipt.landings:
                task, needed = self._plan.tasks[relay.task], self._side.tile_to_receive()
                receipt.landings[relay.task] = Landing(task, needed, value, self._buffers)
            memory = receipt.landings[relay.task].memory(relay)
            receipt.arriving.append((relay, memory, self._broadcast(memory, relay)))
        return receipt

    def wait(self, receipt: GroupReceipt) -> Tensor:
        """This rank's piece, once it has arrived.

        Raises:
            PeerLostError: a sender has died, or took too long.
        """
        for relay, memory, work in receipt.arriving:
            complete(work, self._side.name, relay.path[0])
            receipt.landings[relay.task].deliver(relay, memory)
        return receipt.value

    def keep(self, value: Tensor, receipt: GroupReceipt) -> None:
        """Copy what this rank both holds, in `value`, and needs."""
        self._side.keep(self._plan, value, receipt.value, self._buffers)

    def complete(self, shipment: GroupShipment) -> None:
        """Wait until the others have all of `shipment`.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        for work, _ in shipment.works:
            complete(work, self._side.name)
        shipment.works.clear()

    def finish(self) -> None:
        """Nothing: a collective leaves no one to pass anything on."""

    def _broadcast(self, memory: Tensor, relay: Relay) -> dist.Work:
        group = self._groups[_members(relay)]
        work: dist.Work | None = dist.broadcast(memory, relay.path[0], group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        return work


def _members(relay: Relay) -> tuple[int, ...]:
    return tuple(sorted({*relay.path, *(rank for group in relay.readers for rank in group)}))
