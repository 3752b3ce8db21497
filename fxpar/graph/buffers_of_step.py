"""Which buffers a step changes, whatever the batch: counters of steps, for instance."""

from __future__ import annotations

from fxpar.graph.extract import returned
from fxpar.graph.min_cut import closure, users
from fxpar.ir.stage import JointGraph, Port, PortKind

_GIVEN = (PortKind.PARAMETER, PortKind.BUFFER)
"""What is the same for all microbatches."""


def buffers_of_step(joint: JointGraph) -> tuple[str, ...]:
    """The names of buffers that are to change once per step, and not once per microbatch, as on one process.

    Their new values are computed from parameters, constants, and each other alone. One that the change of a buffer of
    microbatches reads is left out: a cumulative average needs to know of how many microbatches it is one.
    """
    placeholders = dict(zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=False))
    outputs = zip(joint.outputs, returned(joint.module), strict=False)
    changed = {port: value for port, value in outputs if port.kind is PortKind.BUFFER}
    of_batch = closure([node for port, node in placeholders.items() if port.kind not in _GIVEN], users)
    reached = {port: closure([placeholders[port]], users) for port in changed}
    of_microbatches = {port for port, value in changed.items() if value in of_batch}

    def is_tied(port: Port) -> bool:
        return any(changed[port] in reached[other] or changed[other] in reached[port] for other in of_microbatches)

    while tied := {port for port in changed.keys() - of_microbatches if is_tied(port)}:
        of_microbatches |= tied
    return tuple(port.name for port in changed if port not in of_microbatches)
