"""The costs of transfers, from their resharding plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from fxpar.hardware.network import LOOPBACK, Network
from fxpar.schedule.costs import Route, TransferCost

if TYPE_CHECKING:
    from fxpar.resharding.pipeline import Reshard
    from fxpar.resharding.plan import ReshardPlan


def transfer_costs(
    reshards: Iterable[Reshard], network: Network, inside: Network = LOOPBACK
) -> dict[Route, TransferCost]:
    """The costs of the transfers of a microbatch; tied parameters and their gradients are left out."""
    return {
        (reshard.crossing.port.name, reshard.crossing.source, reshard.crossing.targets): plan_cost(
            reshard.plan, network, inside
        )
        for reshard in reshards
        if not reshard.crossing.is_of_parameter
    }


def plan_cost(plan: ReshardPlan, network: Network, inside: Network = LOOPBACK) -> TransferCost:
    """The cost of one resharding: bytes at the rate of the interfaces, and the sender's overhead for each chunk.

    Transfers within a host keep no interface busy. CPU ranks copy them into shared memory and out of it, one task
    after another at worst; sockets of one machine copy as often, so that `LOOPBACK` is of the right order.
    """
    busy_us: defaultdict[str, float] = defaultdict(float)
    inside_us = 0.0
    for relay in plan.relays:
        num_bytes = relay.num_elements * plan.itemsize
        for source, target in pairwise(relay.path):
            busy_us[f"host {plan.hosts[source]} sends"] += network.time_us(num_bytes)
            busy_us[f"host {plan.hosts[source]} sends"] += network.chunk_us * relay.num_chunks
            busy_us[f"host {plan.hosts[target]} receives"] += network.time_us(num_bytes)
        if not relay.num_hops:
            inside_us = max(inside_us, inside.time_us(num_bytes) + inside.chunk_us)
    return TransferCost(max(plan.time_us(network), inside_us), dict(busy_us))
