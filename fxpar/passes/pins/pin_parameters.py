"""Fix the layouts of a stage's parameters: as planned, as their owner has them, or as hinted."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.ir.layout import Layout
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.layouts.pins import Pin
from fxpar.model.distribution import Distribution


def pin_parameters(joint: JointGraph, distribution: Distribution, earlier: Sequence[StageBorder]) -> dict[Port, Pin]:
    """The pins of the stage's parameters; one without plan, owner and hint is left free.

    A hint says how a weight is sharded where it is used, so a hinted weight is never gathered.
    """
    pins: dict[Port, Pin] = {}
    for port in joint.inputs:
        if port.kind is not PortKind.PARAMETER:
            continue
        hint = distribution.hints.parameters.get(port.name)
        decided = _decided(port, distribution, earlier)
        if decided is not None:
            pins[port] = Pin.exactly(decided, fixed_at_use=hint is not None)
        elif hint is not None:
            pins[port] = Pin.hinted(hint)
    return pins


def _decided(port: Port, distribution: Distribution, earlier: Sequence[StageBorder]) -> Layout | None:
    if distribution.plan is not None:
        return distribution.plan.parameters[port.name].layout
    return next((border.inputs[port] for border in earlier if port in border.inputs), None)
