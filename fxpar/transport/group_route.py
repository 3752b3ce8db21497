"""Carry out a resharding plan by collectives: each relay is a broadcast on the group of the ranks that take part.

For NCCL, whose broadcast is a chunked ring of its own, and which moves data inside a host on faster links than shared
memory. Chunks and hops of the plan are left to it; senders, receivers and order are the plan's.

What NCCL does, and so what is proved of programs that use it: a group is a queue in order on each rank, and a
collective is over when all members have come to it. A receive that is posted is at the head of its queue, or behind
others from the same sender, which were sent earlier; so posting it early keeps nothing else waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from fxpar.resharding.plan import Relay, ReshardPlan
from fxpar.transport.buffers import Buffers
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.packing import Landing, packed_relays
from fxpar.transport.route_messages import complete
from fxpar.transport.sender_groups import SenderGroup, sender_group


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
    """As `RelayRoute`, with `groups` in place of messages and shared memory."""

    def __init__(
        self, plan: ReshardPlan, endpoint: Endpoint, groups: Mapping[SenderGroup, dist.ProcessGroup], buffers: Buffers
    ) -> None:
        self._plan, self._endpoint, self._groups, self._buffers = plan, endpoint, groups, buffers
        rank = endpoint.rank
        self._own = [relay for relay in plan.relays if rank in sender_group(relay)[1]]
        self._sent = [relay for relay in self._own if relay.path[0] == rank]
        self._received = [relay for relay in self._own if relay.path[0] != rank]

    def send(self, value: Tensor, microbatch: int) -> GroupShipment:
        """Begin to send this rank's piece, which must not change before all is complete.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype; nothing is sent.
        """
        shipment = GroupShipment()
        for relay, memory in self._loads(value):
            self._send(relay, memory, shipment)
        return shipment

    def post_receive(self, value: Tensor, microbatch: int) -> GroupReceipt:
        """Begin to receive this rank's piece into `value`, whose memory nobody else may use until it is there."""
        receipt = GroupReceipt(value)
        for relay in self._received:
            self._receive(relay, receipt)
        return receipt

    def exchange(self, value: Tensor, into: Tensor, microbatch: int) -> tuple[GroupShipment, GroupReceipt]:
        """Begin to send this rank's piece and to receive another, with what this rank keeps.

        In the order of the plan, which all ranks have in common: so even where all groups share one queue, of ranks
        that send to each other none waits for another.

        Raises:
            ReshardError: as of `send`.
        """
        shipment, receipt = GroupShipment(), GroupReceipt(into)
        loads = iter(self._loads(value))
        for relay in self._own:
            if relay.path[0] == self._endpoint.rank:
                self._send(*next(loads), shipment)
            else:
                self._receive(relay, receipt)
        self._endpoint.keep(self._plan, value, into, self._buffers)
        return shipment, receipt

    def wait(self, receipt: GroupReceipt) -> Tensor:
        """This rank's piece, once it has arrived.

        Raises:
            PeerLostError: a sender has died, or took too long.
        """
        for relay, memory, work in receipt.arriving:
            complete(work, self._endpoint.name, relay.path[0])
            receipt.landings[relay.task].deliver(relay, memory)
        return receipt.value

    def complete(self, shipment: GroupShipment) -> None:
        """Wait until the others have all of `shipment`.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        for work, _ in shipment.works:
            complete(work, self._endpoint.name)
        shipment.works.clear()

    def finish(self) -> None:
        """Nothing: a collective leaves no one to pass anything on."""

    def _loads(self, value: Tensor) -> list[tuple[Relay, Tensor]]:
        """What this rank sends of `value`, by relay."""
        held = self._endpoint.tile_to_send(value)
        memories = packed_relays(self._sent, self._plan.tasks, value, held, self._buffers)
        return list(zip(self._sent, memories, strict=True))

    def _send(self, relay: Relay, memory: Tensor, shipment: GroupShipment) -> None:
        shipment.works.append((self._broadcast(memory, relay), memory))

    def _receive(self, relay: Relay, receipt: GroupReceipt) -> None:
        if relay.task not in receipt.landings:
            task, needed = self._plan.tasks[relay.task], self._endpoint.tile_to_receive()
            receipt.landings[relay.task] = Landing(task, needed, receipt.value, self._buffers)
        memory = receipt.landings[relay.task].memory(relay)
        receipt.arriving.append((relay, memory, self._broadcast(memory, relay)))

    def _broadcast(self, memory: Tensor, relay: Relay) -> dist.Work:
        group = self._groups[sender_group(relay)]
        work: dist.Work | None = dist.broadcast(memory, relay.path[0], group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        return work
