"""Execute a resharding plan by collectives: each relay is a broadcast in the process group of its ranks.

For NCCL, whose broadcast is a chunked ring of its own, and whose links inside a host are faster than shared memory.
NCCL decides on chunks and hops; senders, receivers and order are those of the plan.

The model of NCCL that the checks of programs assume: a group is an ordered queue on each rank, and a collective ends
when all members have reached it. A posted receive is at the head of its queue, or behind receives from the same sender,
which were sent earlier; so a receive that is posted early delays nothing else.
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
    """The handle of a receive that has begun."""

    value: Tensor
    landings: dict[int, Landing] = field(default_factory=dict)
    arriving: list[tuple[Relay, Tensor, dist.Work]] = field(default_factory=list)


@dataclass(slots=True)
class GroupShipment:
    """The handle of a send that has begun; it keeps alive what is being sent."""

    works: list[tuple[dist.Work, Tensor]] = field(default_factory=list)


class GroupRoute:
    """A `Route` like `RelayRoute`, with broadcasts in `groups` instead of messages and shared memory."""

    def __init__(
        self, plan: ReshardPlan, endpoint: Endpoint, groups: Mapping[SenderGroup, dist.ProcessGroup], buffers: Buffers
    ) -> None:
        self._plan, self._endpoint, self._groups, self._buffers = plan, endpoint, groups, buffers
        rank = endpoint.rank
        self._own = [relay for relay in plan.relays if rank in sender_group(relay)[1]]
        self._sent = [relay for relay in self._own if relay.path[0] == rank]
        self._received = [relay for relay in self._own if relay.path[0] != rank]

    def send(self, value: Tensor, microbatch: int) -> GroupShipment:
        """Begin to send this rank's piece, which must not change before `complete`.

        Raises:
            ReshardError: the piece is not of the planned shape or dtype; nothing is sent.
        """
        shipment = GroupShipment()
        for relay, memory in self._loads(value):
            self._send(relay, memory, shipment)
        return shipment

    def post_receive(self, value: Tensor, microbatch: int) -> GroupReceipt:
        """Begin to receive this rank's piece into `value`, which nothing else may use until `wait` returns."""
        receipt = GroupReceipt(value)
        for relay in self._received:
            self._receive(relay, receipt)
        return receipt

    def exchange(self, value: Tensor, into: Tensor, microbatch: int) -> tuple[GroupShipment, GroupReceipt]:
        """Begin to send this rank's piece and to receive another, and copy the part that this rank has already.

        Sends and receives are in the order of the plan, which is the same on all ranks: so ranks that send to each
        other do not deadlock, even where all groups share one queue.

        Raises:
            ReshardError: as in `send`.
        """
        shipment, receipt = GroupShipment(), GroupReceipt(into)
        loads = iter(self._loads(value))
        for relay in self._own:
            if relay.path[0] == self._endpoint.rank:
                self._send(*next(loads), shipment)
            else:
                self._receive(relay, receipt)
        self._endpoint.copy_local_part(self._plan, value, into, self._buffers)
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
        """Wait until the receivers have all of `shipment`.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        for work, _ in shipment.works:
            complete(work, self._endpoint.name)
        shipment.works.clear()

    def finish(self) -> None:
        """Do nothing: with collectives, no rank forwards anything."""

    def _loads(self, value: Tensor) -> list[tuple[Relay, Tensor]]:
        """The bytes of `value` that this rank sends, by relay."""
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
