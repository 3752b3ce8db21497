"""The memory that a stage keeps between its forward and its backward, and until when, measured on its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx

from fxpar.graph.extract import returned
from fxpar.graph.memory_owners import owned_bytes, owner_of
from fxpar.graph.min_cut import kept_bytes
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.partition import Partitioned
from fxpar.passes.split_backward import SplitBackward

Until: TypeAlias = Literal["B", "I", "W"]
"""The computation of a microbatch after which memory can be freed: the whole backward, or one of its halves."""


@dataclass(frozen=True, slots=True)
class KeptPort:
    """A value at the stage's border whose `num_bytes` of memory are needed until `until` has run."""

    port: Port
    num_bytes: int
    until: Until


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """The memory that one microbatch takes in a stage, in bytes of distinct storages.

    saved_until_inputs_bytes: computed by the forward, freed by I, or by the backward if it is not split.
    saved_until_weights_bytes: computed by the forward, freed by W.
    carried_bytes: computed by I, freed by W. Saved values and tangents are not included.
    result_bytes: of the forward's results, beyond saved values. Results stay until the step ends.
    inputs: received edges that are saved as they are. No other figure includes them.
    outputs: edges and results that share their memory with saved values: it is part of a figure above.
    tangents: those that are carried to W as received. No other figure includes them.
    gradients: those of edges that share their memory with carried values: part of `carried_bytes`, or a tangent.

    Parameters, buffers and inputs of the step are in memory anyway, and not counted.
    """

    saved_until_inputs_bytes: int
    saved_until_weights_bytes: int
    carried_bytes: int
    result_bytes: int
    inputs: tuple[KeptPort, ...]
    outputs: tuple[KeptPort, ...]
    tangents: tuple[KeptPort, ...]
    gradients: tuple[KeptPort, ...]

    @property
    def saved_bytes(self) -> int:
        """What the forward computes and saves for the backward."""
        return self.saved_until_inputs_bytes + self.saved_until_weights_bytes


def activation_memory(joint: JointGraph, parts: Partitioned, halves: SplitBackward | None = None) -> ActivationMemory:
    """Measure what is kept between the `parts` that `partition` made of `joint`, and between `halves` of the backward.

    Exact for the aten lowering. A view takes no memory, but keeps the whole storage that it views.
    """
    saved = _saved_owners(joint, parts, halves)
    ports = dict(zip(parts.forward.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    own = {owner: until for owner, until in saved.items() if owner not in ports}
    outputs = [(port, owner_of(node)) for port, node in zip(joint.outputs, returned(parts.forward), strict=False)]
    results = {owner for port, owner in outputs if port.kind is PortKind.RESULT} - own.keys() - ports.keys()
    carried = _Carried(set(), (), ()) if halves is None else _Carried.of(joint, halves)
    return ActivationMemory(
        owned_bytes(owner for owner, until in own.items() if until != "W"),
        owned_bytes(owner for owner, until in own.items() if until == "W"),
        owned_bytes(carried.owners),
        owned_bytes(results),
        tuple(_kept(ports[owner], owner, until) for owner, until in saved.items() if _is_edge(ports.get(owner))),
        tuple(_kept(port, owner, own[owner]) for port, owner in outputs if owner in own),
        tuple(_kept(port, owner, "W") for port, owner in carried.tangents),
        tuple(_kept(port, owner, "W") for port, owner in carried.gradients),
    )


def _saved_owners(joint: JointGraph, parts: Partitioned, halves: SplitBackward | None) -> dict[fx.Node, Until]:
    """The owners of the memory that the forward saves, and until when it is needed."""
    owners = [owner_of(node) for node in returned(parts.forward)[len(joint.outputs) :]]
    if halves is None:
        return dict.fromkeys(owners, "B")
    passed_on = _carried_owners(joint, halves)
    taken = zip(halves.inputs_saved, halves.inputs.graph.find_nodes(op="placeholder"), strict=False)
    late = {*halves.weights_saved, *(position for position, node in taken if node in passed_on)}
    until: dict[fx.Node, Until] = dict.fromkeys(owners, "I")
    return until | {owners[position]: "W" for position in late}


def _carried_owners(joint: JointGraph, halves: SplitBackward) -> set[fx.Node]:
    return {owner_of(node) for node in returned(halves.inputs)[_num_edges(joint) :]}


@dataclass(frozen=True, slots=True)
class _Carried:
    """What I carries: the owners of memory that I allocates, and the ports that share memory with carried values."""

    owners: set[fx.Node]
    tangents: Sequence[tuple[Port, fx.Node]]
    gradients: Sequence[tuple[Port, fx.Node]]

    @staticmethod
    def of(joint: JointGraph, halves: SplitBackward) -> _Carried:
        carried = _carried_owners(joint, halves)
        placeholders = halves.inputs.graph.find_nodes(op="placeholder")
        own = {node for node in carried if node.op == "call_function"}
        tangents = zip(joint.tangents, placeholders[len(halves.inputs_saved) :], strict=True)
        edges = [port for port in joint.gradients if _is_edge(port)]
        gradients = zip(edges, map(owner_of, returned(halves.inputs)), strict=False)
        return _Carried(
            own,
            [(port, node) for port, node in tangents if node in carried],
            [(port, owner) for port, owner in gradients if owner in carried],
        )


def _num_edges(joint: JointGraph) -> int:
    return sum(map(_is_edge, joint.gradients))


def _is_edge(port: Port | None) -> bool:
    return port is not None and port.kind is PortKind.EDGE


def _kept(port: Port, owner: fx.Node, until: Until) -> KeptPort:
    return KeptPort(port, kept_bytes(owner), until)
