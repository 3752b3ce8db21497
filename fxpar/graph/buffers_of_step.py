"""Which buffers a step changes, whatever the batch: counters of steps, for instance."""

from __future__ import annotations

from collections.abc import Mapping, Set

from fxpar.graph.extract import returned
from fxpar.graph.min_cut import closure, operands
from fxpar.ir.stage import JointGraph, Port, PortKind


def buffers_of_step(joint: JointGraph) -> tuple[str, ...]:
    """The names of buffers that are to change once per step, and not once per microbatch, as on one process.

    Their new values are computed from parameters, constants, and each other alone. Those that other buffers' changes
    read are left out: a cumulative average needs to know of how many microbatches it is one.
    """
    placeholders = dict(zip(joint.module.graph.find_nodes(op="placeholder"), joint.inputs, strict=False))
    reads: dict[Port, set[Port]] = {}
    for port, value in zip(joint.outputs, returned(joint.module), strict=False):
        if port.kind is PortKind.BUFFER:
            reads[port] = {placeholders[node] for node in closure([value], operands) if node in placeholders}
    found = set(reads)
    while unfit := {port for port in found if not _is_of_step(port, reads, found)}:
        found -= unfit
    return tuple(port.name for port in reads if port in found)


def _is_of_step(port: Port, reads: Mapping[Port, Set[Port]], found: Set[Port]) -> bool:
    """Whether no microbatch has a part in the change of a buffer, if none has in those of `found`."""
    of_microbatches = reads.keys() - found
    are_given = all(each.kind in (PortKind.PARAMETER, PortKind.BUFFER) for each in reads[port])
    return are_given and reads[port].isdisjoint(of_microbatches) and all(port not in reads[o] for o in of_microbatches)
