"""Where a stage's parameters must lie before layouts are chosen: as planned, as their owner has them, or as hinted."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.hints import Grouped, Spec
from fxpar.layout import Layout, Shard
from fxpar.layouts.pins import Pin, Pins
from fxpar.model.distribution import Distribution
from fxpar.stage import JointGraph, Port, PortKind, StageBorder


def pin_parameters(joint: JointGraph, distribution: Distribution, earlier: Sequence[StageBorder]) -> Pins:
    """The pins of the stage's parameters; one without plan, owner and hint is left free.

    A hint says how a weight lies where it is used, so a hinted weight is never gathered.
    """
    pins: dict[Port, Pin] = {}
    for port in joint.inputs:
        if port.kind is not PortKind.PARAMETER:
            continue
        hint = distribution.hints.parameters.get(port.name)
        decided = _decided(port, distribution, earlier)
        if decided is not None:
            pins[port] = _exactly(decided, fixed_at_use=hint is not None)
        elif hint is not None:
            pins[port] = Pin(_shards(hint), fixed_at_use=True)
    return Pins(pins)


def _decided(port: Port, distribution: Distribution, earlier: Sequence[StageBorder]) -> Layout | None:
    if distribution.plan is not None:
        return distribution.plan.parameters[port.name].layout
    return next((border.inputs[port] for border in earlier if port in border.inputs), None)


def _exactly(layout: Layout, *, fixed_at_use: bool) -> Pin:
    shards = {axis: (shard.dim, shard.outer) for axis, shard in layout.axes if isinstance(shard, Shard)}
    return Pin(shards, fixed_at_use)


def _shards(spec: Spec) -> dict[str, tuple[int, int | None]]:
    """A hint as pinned dims; a plain axis leaves the digit of a fused dim to the search."""
    shards: dict[str, tuple[int, int | None]] = {}
    for dim, entry in enumerate(spec):
        if isinstance(entry, Grouped):
            shards[entry.axis] = (dim, entry.groups)
        elif entry is not None:
            shards[entry] = (dim, None)
    return shards
