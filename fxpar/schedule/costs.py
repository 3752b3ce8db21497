"""What the parts of a step cost: computations by stage and kind, transfers by route, memory by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from fxpar.errors import InvalidCostsError
from fxpar.resharding.network import LOOPBACK, Network
from fxpar.schedule.action import Action, Kind
from fxpar.schedule.build import weight_delays
from fxpar.schedule.memory import StageMemory
from fxpar.schedule.transfer import Edge, Routes, Transfer

if TYPE_CHECKING:
    from fxpar.pipeline import Reshard
    from fxpar.resharding.plan import ReshardPlan

Route: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Edge, source stage and target stages of a transfer, whatever its microbatch."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """How long a transfer takes that has the network for itself, and how long each link is busy with it, by name.

    A link is one direction of a host's interface. It moves one transfer after another.
    """

    time_us: float
    busy_us: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step of `edges` between stages on the ranks of `placement` costs.

    Computations are given by stage and kind; what stays on its rank is no transfer, and takes no time. Reductions of
    gradients and what crosses once per step are not included. `num_microbatches` is None where any number will do;
    `memory` may lack.
    """

    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    compute_us: Mapping[int, Mapping[Kind, float]]
    transfers: Mapping[Route, TransferCost]
    num_microbatches: int | None = None
    memory: Mapping[int, StageMemory] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """How many stages there are, whether or not their costs are known."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """How many pipe ranks share the stages."""
        return max(self.placement) + 1

    def knows(self, stage: int, kind: Kind) -> bool:
        """Whether `action_us` has an answer."""
        known = self.compute_us.get(stage, {})
        return kind in known or (kind == "B" and "I" in known and "W" in known)

    def action_us(self, stage: int, kind: Kind) -> float:
        """How long a computation takes; a whole backward takes as long as its parts if it is not known itself.

        Raises InvalidCostsError if that is not known.
        """
        known = self.compute_us.get(stage, {})
        if not self.knows(stage, kind):
            found = ", ".join(known) or "nothing"
            raise InvalidCostsError(
                f"stage {stage}: expected the time of {kind}, found that of {found}", _REMEDIES.get(kind, "measure it")
            )
        return known[kind] if kind in known else known["I"] + known["W"]

    def transfer(self, transfer: Transfer, *, stays: bool = False) -> TransferCost:
        """What a transfer costs; one that `stays` on its pipe rank costs nothing unless its layout changes there.

        Raises InvalidCostsError if that is not known.
        """
        cost = self.transfers.get((transfer.edge, transfer.source, transfer.targets))
        if cost is None and stays:
            return TransferCost(0.0)
        if cost is None:
            raise InvalidCostsError(f"expected the cost of transfer {transfer}, found none", "compile the step anew")
        return cost

    def without_communication(self) -> Costs:
        """The same, if transfers took no time."""
        return replace(self, transfers=dict.fromkeys(self.transfers, TransferCost(0.0)))

    def weight_delays(self, num_microbatches: int) -> tuple[int, ...]:
        """What `weight_delays` says of them: by how many microbatches weight gradients of each stage lag behind.

        Raises InvalidCostsError if the times of weight gradients are not known.
        """
        weights_us = [self.action_us(stage, "W") for stage in range(self.num_stages)]
        hops_us = [0.0] * self.num_stages
        for (_, source, targets), cost in self.transfers.items():
            if targets == (source - 1,):
                hops_us[source] = max(hops_us[source], cost.time_us)
        return weight_delays(weights_us, hops_us, num_microbatches)


_REMEDIES: Mapping[Kind, str] = {
    "I": "give the times of both parts of the backward, I and W, or choose a schedule that runs it as one",
    "W": "give the times of both parts of the backward, I and W, or choose a schedule that runs it as one",
    "B": "give the time of the whole backward B, or those of both its parts, I and W",
}


def uniform_costs(
    placement: Sequence[int],
    edges: Sequence[Edge],
    compute_us: Mapping[Kind, Sequence[float]],
    value_us: float = 0.0,
    gradient_us: float = 0.0,
) -> Costs:
    """Costs where all values take equally long, and all gradients.

    Between two ranks there is one link per direction. A multicast takes the links from its source to its first target
    and on from target to target, all at once: chunks follow each other closely.

    Args:
        compute_us: `compute_us[kind][stage]` is what an action takes.
    """
    routes = Routes(edges, placement)
    transfers: dict[Route, TransferCost] = {}
    for stage in range(len(placement)):
        for transfer in (*routes.sent(Action(stage, "F", 0)), *routes.sent(Action(stage, "B", 0))):
            if not routes.stays(transfer):
                time_us = gradient_us if transfer.is_backward else value_us
                way = pairwise((routes.source_rank(transfer), *routes.target_ranks(transfer)))
                busy_us = {f"rank {source} to {target}": time_us for source, target in way}
                transfers[transfer.edge, transfer.source, transfer.targets] = TransferCost(time_us, busy_us)
    by_stage = {stage: {kind: times[stage] for kind, times in compute_us.items()} for stage in range(len(placement))}
    return Costs(tuple(placement), tuple(edges), by_stage, transfers)


def transfer_costs(reshards: Iterable[Reshard], network: Network) -> dict[Route, TransferCost]:
    """What the transfers of every microbatch cost; lent parameters and their gradients are not among them."""
    return {
        (reshard.crossing.port.name, reshard.crossing.source, reshard.crossing.targets): plan_cost(
            reshard.plan, network
        )
        for reshard in reshards
        if not reshard.crossing.is_of_parameter
    }


def plan_cost(plan: ReshardPlan, network: Network) -> TransferCost:
    """The cost of one resharding: bytes at the rate of the interfaces; messages cost those that send them.

    Inside a host, ranks copy into memory that they share and out of it, one task after another at worst. Sockets of
    one machine copy as often, so that `LOOPBACK` is of the right order; no interface is busy.
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
            inside_us = max(inside_us, LOOPBACK.time_us(num_bytes) + LOOPBACK.chunk_us)
    return TransferCost(max(plan.time_us(network), inside_us), dict(busy_us))
