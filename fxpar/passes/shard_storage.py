"""Shard the storage of parameters over z, an axis that splits the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxpar.ir.dtensor import is_expressible
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.node_meta import Placed, placed, set_placed
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.progress.phases import as_phase
from fxpar.world.mesh import STAGE_AXES, Mesh


@as_phase
def shard_storage(joint: JointGraph, border: StageBorder, mesh: Mesh) -> StageBorder:
    """Let parameters enter `joint`, and their gradients leave it, in the layout of storage; returns the new border.

    Each rank along z has its own part of the batch, and all values in the graph belong to that part. So every user
    needs a parameter whole along z, and its gradient is this rank's term of a sum over z; only at the border of the
    graph are both sharded over z.
    Source: Algorithm 1 of AxoNN (Singh et al., section 3), all-gather and reduce-scatter over z.

    Before: `w` of [4, 8] enters, its gradient of [4, 8] leaves
    After:  `w` of [2@z*2, 8] enters, its gradient of [2@z*2, 8] leaves
    """
    if mesh.z == 1:
        return border
    inputs = {port: stored(used, mesh.z) if _is_stored(port) else used for port, used in border.inputs.items()}
    gradients = {port: _as_stored(port, layout, inputs) for port, layout in border.gradients.items()}
    for node, port in zip(joint.module.graph.find_nodes(op="placeholder"), joint.inputs, strict=False):
        set_placed(node, Placed((), (inputs[port],)))
    output = joint.module.graph.output_node()
    needs = placed(output).inputs[: len(joint.outputs)]
    set_placed(output, Placed((*needs, *(gradients[port] for port in joint.gradients)), ()))
    return StageBorder(inputs, border.outputs, border.tangents, gradients)


def stored(used: Layout, parts: int) -> Layout:
    """The layout in which a parameter that is used in layout `used` is stored over the `parts` ranks of z.

    z shards a dim inside the digits that other axes hold, the first dim if possible: gathered pieces are then
    consecutive in memory, and need no copy. Else another dim that divides evenly; else, unevenly, a dim that no other
    axis shards. A parameter is replicated if it is too small, or if DTensor could not express the shard, as for the
    fused biases of q, k and v.
    """
    if parts == 1:
        return used
    behind = [Shard(dim, parts, _taken(used, dim)) for dim in range(len(used.shape))]
    even = [shard for shard in behind if shard.fits(used.shape[shard.dim]) and _is_possible(used, shard)]
    if even:
        return used.with_placement("z", min(even, key=lambda shard: (_num_runs(used, shard) > 1, shard.dim)))
    alone = [shard for shard in behind if shard.outer == 1 and used.shape[shard.dim] >= parts]
    alone = [shard for shard in alone if _is_possible(used, shard)]
    if alone:
        return used.with_placement("z", min(alone, key=lambda shard: _largest_share(used, shard)))
    return used


def _is_possible(used: Layout, shard: Shard) -> bool:
    return used.accepts(shard) and is_expressible(used.with_placement("z", shard), STAGE_AXES)


def _is_stored(port: Port) -> bool:
    return port.kind is PortKind.PARAMETER


def _as_stored(port: Port, layout: Layout, inputs: Mapping[Port, Layout]) -> Layout:
    return layout.with_placement("z", inputs[port].placement("z")) if _is_stored(port) else layout


def _taken(used: Layout, dim: int) -> int:
    """The product of the sizes of the digits of `dim`, up to the innermost one that an axis holds."""
    held = [p for _, p in used.axes if isinstance(p, Shard) and p.dim == dim]
    return max((shard.outer * shard.parts for shard in held), default=1)


def _num_runs(used: Layout, shard: Shard) -> int:
    """How many separate runs of memory one rank's shard has in the gathered local weight."""
    before = [digit.size for dim in range(shard.dim) for digit in used.digits(dim) if digit.axis is None]
    held = math.prod(p.parts for _, p in used.axes if isinstance(p, Shard) and p.dim == shard.dim)
    return math.prod(before) * (shard.outer // held)


def _largest_share(used: Layout, shard: Shard) -> float:
    size = used.shape[shard.dim]
    return -(-size // shard.parts) / size
