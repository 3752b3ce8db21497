"""Process groups in which one rank sends to the others, created and connected before the first send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fxpar.resharding.plan import Relay, ReshardPlan

SenderGroup: TypeAlias = tuple[int, tuple[int, ...]]
"""The sender, and all members in ascending order."""


def sender_group(relay: Relay) -> SenderGroup:
    """The group that `relay` moves in."""
    members = {*relay.path, *(rank for readers in relay.readers for rank in readers)}
    return relay.path[0], tuple(sorted(members))


def connect_senders(
    plans: Iterable[ReshardPlan], timeout: timedelta, device: torch.device
) -> Mapping[SenderGroup, dist.ProcessGroup]:
    """The groups of all relays of `plans`; a collective of all ranks, with the same arguments but for the device index.

    A group is a queue on each of its ranks. With one sender per group, it is enough that every receiver receives in the
    order in which the sender sends, independent of sends in the other direction. So all values with the same sender and
    the same members share a group, for as long as the world exists. NCCL connects a group in its first collective,
    which blocks the CPU until all members have called it. If the first collectives were receives posted in several
    groups, ranks would call them in different orders, and deadlock. So each new group runs its first collective here,
    in the same order on all ranks.

    Args:
        timeout: how long one collective may take.
    """
    assert dist.group.WORLD is not None, "the default process group must exist"
    known = _known.setdefault(dist.group.WORLD, {})
    wanted = sorted({sender_group(relay) for plan in plans for relay in plan.relays})
    new = [group for group in wanted if (group, timeout) not in known]
    for sender, members in new:
        known[(sender, members), timeout] = dist.new_group(list(members), timeout=timeout)
    for sender, members in new:
        if dist.get_rank() in members:
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            dist.broadcast(probe, sender, known[(sender, members), timeout])
            probe.cpu()  # waits for the device: `broadcast` has only been queued in a stream
    return {group: known[group, timeout] for group in wanted}


_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[SenderGroup, timedelta], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)
"""By world."""
