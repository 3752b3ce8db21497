"""What a compiled training step is, as plain data: each rank dumps its part, and reports are made of all parts.

`StepFacts` is equal on all ranks, and written by the first; `RankFacts` has the stages of one rank. Both are JSON.
Times are predictions in microseconds; bytes are those of one rank unless a name says otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

VERSION = 1
"""Of the form of the files; one that a reader does not expect is refused."""

STEP_FACTS, RANK_FACTS = "step_facts", "rank_facts"
"""The names of the files, as passes have names."""


@dataclass(frozen=True, slots=True)
class AxisFacts:
    """The network along one mesh axis.

    num_hosts: that one group of ranks along the axis spans.
    rings_per_host: how many groups share the interfaces of a host; 0 if every group is within a host.
    bytes_per_us: the rate at which a rank sends.
    """

    axis: str
    size: int
    num_hosts: int
    rings_per_host: int
    latency_us: float
    bytes_per_us: float

    @property
    def crosses_hosts(self) -> bool:
        """Whether its collectives go over the network between hosts."""
        return self.rings_per_host > 0


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The machines by which times are predicted."""

    name: str
    ranks_per_host: int
    inside_bytes_per_us: float
    host_bytes_per_us: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """A parameter, or the result of a module, and how it is sharded over the ranks of its stage.

    num_bytes: of the whole. rank_bytes: of the largest piece.
    """

    name: str
    kind: str
    stage: int
    dtype: str
    shape: tuple[int, ...]
    layout: str
    num_bytes: int
    rank_bytes: int


@dataclass(frozen=True, slots=True)
class RelayFacts:
    """A part of a transfer: `num_bytes` along `path`, from rank to rank; it begins and ends in bytes of one interface.

    readers: ranks that read it from the memory of a rank of the path on their host.
    """

    task: int
    num_bytes: int
    path: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """The plan by which a value moves from stage `source` to `targets`; `bound_bytes` limits every plan from below."""

    name: str
    source: int
    targets: tuple[int, ...]
    is_gradient: bool
    once_per_step: bool
    source_layout: str
    target_layouts: tuple[str, ...]
    strategy: str
    num_bytes: int
    makespan_bytes: int
    bound_bytes: int
    time_us: float
    relays: tuple[RelayFacts, ...]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all ranks know of a step; its costs are in a file of their own.

    axes: of the mesh, outermost first.
    hosts: the host of each rank.
    boundaries: the modules that open the second and later stages.
    schedule: the actions of each pipe rank, a line each.
    profiled: whether the times of actions in the costs were measured, rather than estimated.
    memory_budget: that of one rank; None if there is no limit.
    timeline: the folder that measured steps are written to, if they are.
    """

    version: int
    axes: tuple[AxisFacts, ...]
    hosts: tuple[int, ...]
    cluster: ClusterFacts
    boundaries: tuple[str, ...]
    schedule_name: str
    schedule: str
    microbatches: int
    profiled: bool
    memory_budget: float | None
    timeline: str | None
    layouts: tuple[LayoutFacts, ...]
    transfers: tuple[TransferFacts, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size."""
        return {each.axis: each.size for each in self.axes}


@dataclass(frozen=True, slots=True)
class CollectiveFacts:
    """A collective of a graph, or several gradients' reductions together; fused ones are part of an op with matmuls.

    num_bytes: of its local input or output, whichever is larger. sent_bytes: what a rank sends for it.
    exposed_us: how long computation waits for it.
    verdict: whether it was fused, and why.
    """

    graph: str
    name: str
    kind: str
    axis: str
    module: str
    count: int
    num_bytes: int
    sent_bytes: float
    time_us: float
    exposed_us: float
    fused: str | None
    verdict: str


@dataclass(frozen=True, slots=True)
class ReplicatedFacts:
    """Calls of one op in one kind of module that several ranks run on the same values, in one microbatch.

    module: as `module_pattern` has it.
    axes: along which the ranks repeat it.
    time_us: of all calls. wasted_us: what sharding over these axes would save at best.
    """

    op: str
    module: str
    count: int
    axes: tuple[str, ...]
    has_rule: bool
    time_us: float
    wasted_us: float


@dataclass(frozen=True, slots=True)
class ActionFacts:
    """A computation of one microbatch: from start to end, and without waits for collectives."""

    total_us: float
    compute_us: float


@dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage on one of its ranks.

    actions: by kind.
    once_us: gathers of weights and reductions of gradients, which run once per step.
    collectives: of the graphs of one microbatch, whose names are kinds of actions, then those of the step, "once".
    """

    stage: int
    actions: Mapping[str, ActionFacts]
    once_us: float
    collectives: tuple[CollectiveFacts, ...]
    replicated: tuple[ReplicatedFacts, ...]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The stages of one rank; of ranks that share them, and have pieces of one size, these are equal."""

    version: int
    stages: tuple[StageFacts, ...]


ONCE = "once"
"""The graph of what runs once per step."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind over one axis."""

    axis: str
    kind: str
    count: float
    sent_bytes: float
    time_us: float
    exposed_us: float

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.axis,
            self.kind,
            self.count + other.count,
            self.sent_bytes + other.sent_bytes,
            self.time_us + other.time_us,
            self.exposed_us + other.exposed_us,
        )


def add_up(collectives: Iterable[CollectiveFacts], runs: Mapping[str, float]) -> list[Traffic]:
    """The collectives of a step by axis and kind, where graph g runs `runs[g]` times."""
    found: dict[tuple[str, str], Traffic] = {}
    for each in collectives:
        times, key = runs.get(each.graph, 0.0), (each.axis, each.kind)
        own = Traffic(*key, times * each.count, times * each.sent_bytes, times * each.time_us, times * each.exposed_us)
        found[key] = found[key].plus(own) if key in found else own
    return list(found.values())


def module_pattern(path: str) -> str:
    """A module's path with `*` for each number, which equal layers share."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


T = TypeVar("T")


def to_json(facts: StepFacts | RankFacts) -> str:
    """The text that `from_json` reads."""
    return json.dumps(asdict(facts), separators=(",", ":"))


def from_json(kind: type[T], text: str) -> T:
    """The facts in `text`.

    Raises ValueError if it is of another version, or not what `to_json` writes.
    """
    try:
        raw = json.loads(text)
        found = raw["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("no facts of a step") from None
    if found != VERSION:
        raise ValueError(f"facts of version {found}, expected {VERSION}")
    try:
        decoded: T = _decoded(kind, raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"incomplete facts: {error!r}") from None
    return decoded


def _decoded(kind: Any, raw: Any) -> Any:
    """`raw`, as JSON has it, in the form of the type `kind`."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{field.name: _decoded(hints[field.name], raw[field.name]) for field in fields(kind)})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(_decoded(inner[0], item) for item in raw)
    if origin is UnionType:
        return raw
    if origin is not None:  # a mapping by text
        return {name: _decoded(inner[1], item) for name, item in raw.items()}
    return raw
