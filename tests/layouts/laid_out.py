"""Models laid out by `propagate_layouts` under prices that a test sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxpar.costs.prices import Link, Prices
from fxpar.ir.hints import Spec, resolve_hints
from fxpar.ir.node_meta import is_backward
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.layouts.pins import Pin, Pins
from fxpar.passes.decompose.norm_policy import ONE_RANK, NormPolicy
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.insert_collectives import Collective, collectives, insert_collectives
from fxpar.passes.propagate_layouts import propagate_layouts
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph


def prices(
    *, latency_us: float = 1.0, bytes_per_us: float = 1e4, saved_us_per_byte: float = 0.0, flops_per_us: float = 1e4
) -> Prices:
    """Prices in which collectives cost more than what they save in pointwise work."""
    links = dict.fromkeys(("y", "x"), Link(latency_us, bytes_per_us))
    return Prices(links, 1e4, flops_per_us, 1e6, saved_us_per_byte, stored_us_per_byte=1e-6)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A laid-out joint graph, its border, and the collectives of its local graph."""

    joint: JointGraph
    border: StageBorder
    collectives: list[Collective]

    def parameter(self, name: str) -> str:
        """The layout of a parameter, as text."""
        return str(self.border.inputs[Port(PortKind.PARAMETER, name)])

    def gradient(self, name: str) -> str:
        """The layout of a parameter's gradient, as text."""
        return str(self.border.gradients[Port(PortKind.PARAMETER, name)])

    def count(self, *, backward: bool, at_least_bytes: int = 0) -> Counter[str]:
        """The collectives of one direction by kind, the small ones left out."""
        return Counter(
            c.kind for c in self.collectives if is_backward(c.node) == backward and c.num_bytes >= at_least_bytes
        )


def decomposed(
    model: nn.Module, *args: Any, with_backward: bool = True, norm_policy: NormPolicy = ONE_RANK, **kwargs: Any
) -> JointGraph:
    """The joint graph of a model as it comes to `propagate_layouts`."""
    joint = joint_graph(model, *args, with_backward=with_backward, **kwargs)
    return replace(joint, module=decompose_for_sharding(joint.module, norm_policy))


def pins_of(model: nn.Module, hints: Mapping[str, Spec]) -> Pins:
    """Hints on parameters, by pattern, as pins."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = resolve_hints(hints, shapes, []).parameters
    return Pins({Port(PortKind.PARAMETER, name): Pin.hinted(spec) for name, spec in found.items()})


def lay_out(
    joint: JointGraph,
    pins: Pins,
    weighed: Prices,
    *,
    microbatches: int = 1,
    hosts: tuple[int, ...] | None = None,
    earlier: Sequence[StageBorder] = (),
    **sizes: int,
) -> LaidOut:
    """Choose layouts over a mesh of the given sizes, on one host if nothing else is said."""
    with fake_mesh(**sizes) as mesh:
        mesh = mesh if hosts is None else replace(mesh, hosts=hosts)
        border = propagate_layouts(joint, mesh, pins, weighed, microbatches, earlier)
        return LaidOut(joint, border, collectives(insert_collectives(joint, mesh).module.graph))
