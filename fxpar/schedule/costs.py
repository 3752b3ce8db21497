"""The costs of a step: computations by stage and kind, transfers by route, memory by stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from fxpar.errors import InvalidCostsError
from fxpar.schedule.action import Action, Kind
from fxpar.schedule.build import weight_delays
from fxpar.schedule.memory import StageMemory
from fxpar.schedule.transfer import Edge, Routes, Transfer

Route: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Edge, source stage and target stages of a transfer, without its microbatch."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The time of a transfer that has the network for itself, and how long each link is busy with it, by name.

    A link is one direction of a host's interface. It moves one transfer after another.
    """

    time_us: float
    busy_us: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a step with `edges` between stages on the ranks of `placement`.

    `compute_us` is by stage and kind. Values that stay on their rank are not in `transfers` and take no time, unless
    their layout changes. Reductions of gradients and transfers once per step are not included. `num_microbatches` is
    None if any number will do; `memory` may be missing.
    """

    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    compute_us: Mapping[int, Mapping[Kind, float]]
    transfers: Mapping[Route, TransferCost]
    num_microbatches: int | None = None
    memory: Mapping[int, StageMemory] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """The number of stages, whether or not their costs are known."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """How many pipe ranks share the stages."""
        return max(self.placement) + 1

    def knows(self, stage: int, kind: Kind) -> bool:
        """Whether `action_us` returns a time."""
        known = self.compute_us.get(stage, {})
        return kind in known or (kind == "B" and "I" in known and "W" in known)

    def action_us(self, stage: int, kind: Kind) -> float:
        """The time of a computation; for a whole backward that is not known itself, the sum of its parts.

        Raises InvalidCostsError if that is not known.
        """
        known = self.compute_us.get(stage, {})
        if not self.knows(stage, kind):
            problem = f"stage {stage}: expected the time of {kind}, found that of {', '.join(known) or 'nothing'}"
            raise InvalidCostsError(problem, _REMEDIES[kind] if known else _OF_ALL)
        return known[kind] if kind in known else known["I"] + known["W"]

    def transfer(self, transfer: Transfer, *, stays: bool = False) -> TransferCost:
        """The cost of a transfer; one that `stays` on its pipe rank costs nothing unless its layout changes there.

        Raises InvalidCostsError if that is not known.
        """
        cost = self.transfers.get((transfer.edge, transfer.source, transfer.targets))
        if cost is None and stays:
            return TransferCost(0.0)
        if cost is None:
            raise InvalidCostsError(f"expected the cost of transfer {transfer}, found none", "compile the step anew")
        return cost

    def without_communication(self) -> Costs:
        """The same costs, but transfers take no time."""
        return replace(self, transfers=dict.fromkeys(self.transfers, TransferCost(0.0)))

    def weight_delays(self, num_microbatches: int) -> tuple[int, ...]:
        """By how many microbatches weight gradients of each stage lag behind, as `build.weight_delays` returns.

        Raises InvalidCostsError if the times of weight gradients are not known.
        """
        weights_us = [self.action_us(stage, "W") for stage in range(self.num_stages)]
        hops_us = [0.0] * self.num_stages
        for (_, source, targets), cost in self.transfers.items():
            if targets == (source - 1,):
                hops_us[source] = max(hops_us[source], cost.time_us)
        return weight_delays(weights_us, hops_us, num_microbatches)

    def save(self, path: str | Path) -> None:
        """Write them as JSON. Ranks that know only their own stages may each write what they know."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """The JSON text that `save` writes."""
        return json.dumps(_to_json(self), indent=1)

    @staticmethod
    def load(path: str | Path) -> Costs:
        """What `save` wrote to the file `path`, or to all files below that folder whose names end in `costs.json`.

        Raises InvalidCostsError if they are not there, not readable, or not of one step.
        """
        root = Path(path)
        files = sorted(root.rglob("*costs.json")) if root.is_dir() else [root]
        if not files:
            raise InvalidCostsError(f"expected files *costs.json below {root}, found none", _COMPILE)
        return Costs.merge([_load(file) for file in files])

    @staticmethod
    def merge(parts: Sequence[Costs]) -> Costs:
        """The costs of one step from several ranks. For ranks that share a stage, the largest figures count.

        Raises InvalidCostsError if they differ in anything but the figures of stages.
        """
        first = parts[0]
        if any(replace(part, compute_us={}, memory={}) != replace(first, compute_us={}, memory={}) for part in parts):
            raise InvalidCostsError("expected all files to be of one compile, found differences", "compile anew")
        compute_us: dict[int, dict[Kind, float]] = {}
        memory: dict[int, StageMemory] = {}
        for part in parts:
            for stage, times in part.compute_us.items():
                known = compute_us.setdefault(stage, {})
                known.update({kind: max(time_us, known.get(kind, 0.0)) for kind, time_us in times.items()})
            for stage, figures in part.memory.items():
                memory[stage] = max(figures, memory.get(stage, figures), key=_fixed_bytes)
        return replace(first, compute_us=compute_us, memory=memory)


_COMPILE = 'compile with options={"dump": FOLDER}'
_OF_ALL = "give the costs that the ranks of every stage have written"
_REMEDIES: Mapping[Kind, str] = {
    "F": "give that, too",
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
    """Costs in which all values take equally long, and all gradients.

    Between two ranks there is one link per direction. A multicast occupies the links from its source to its first
    target and from target to target at the same time: its chunks are pipelined.

    Args:
        compute_us: `compute_us[kind][stage]` is the time of an action.
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


def _to_json(costs: Costs) -> dict[str, Any]:
    return {
        "num_microbatches": costs.num_microbatches,
        "placement": costs.placement,
        "edges": [asdict(edge) for edge in costs.edges],
        "compute_us": {str(stage): dict(times) for stage, times in costs.compute_us.items()},
        "transfers": [
            {"edge": edge, "source": source, "targets": targets, **asdict(cost)}
            for (edge, source, targets), cost in costs.transfers.items()
        ],
        "memory": {str(stage): _sorted(asdict(figures)) for stage, figures in costs.memory.items()},
    }


def _sorted(figures: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no sets."""
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in figures.items()}


def _load(path: Path) -> Costs:
    try:
        return _from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidCostsError(f"expected a file or folder at {path}, found {error}", _COMPILE) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCostsError(f"{path} is not what this release writes: {error!r}", _COMPILE) from None


def _from_json(found: Mapping[str, Any]) -> Costs:
    return Costs(
        tuple(found["placement"]),
        tuple(Edge(**{**edge, "targets": tuple(edge["targets"])}) for edge in found["edges"]),
        {int(stage): times for stage, times in found["compute_us"].items()},
        {
            (cost["edge"], cost["source"], tuple(cost["targets"])): TransferCost(cost["time_us"], cost["busy_us"])
            for cost in found["transfers"]
        },
        found["num_microbatches"],
        {int(stage): StageMemory(**_with_sets(figures)) for stage, figures in found["memory"].items()},
    )


def _with_sets(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: frozenset(value) if isinstance(value, list) else value for name, value in figures.items()}


def _fixed_bytes(figures: StageMemory) -> int:
    kept = figures.saved_for_inputs + figures.saved_for_weights + figures.carried
    return figures.parameters + figures.gradients + figures.optimizer + kept
