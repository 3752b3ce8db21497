"""Decide which norms to decompose before layouts are chosen: by the number of ranks and the hints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import JointGraph, PortKind
from fxpar.layouts.pins import Pin, Pins
from fxpar.layouts.search import AUTOMATIC_AXES
from fxpar.passes.decompose.norm_decompositions import GROUP_NORMS, LAYER_NORMS
from fxpar.progress.phases import as_phase
from fxpar.rules.call import argument, op_call
from fxpar.world.mesh import Mesh

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NormPolicy:
    """`num_ranks`: how many ranks share a value; `shards_hidden`: whether layer norms may see a sharded hidden dim.

    Norms are left whole where no gain is expected: their kernels are faster, and equal eager bit by bit.
    """

    num_ranks: int = 1
    shards_hidden: bool = False

    def decomposes(self, node: fx.Node) -> bool:
        """Whether the norm at `node` shards better in parts."""
        if node.target in LAYER_NORMS:
            return self.shards_hidden
        if node.target not in GROUP_NORMS:
            return False
        call = op_call(node)
        groups, channels = argument(call, "group"), argument(call, "C")
        return bool(groups % self.num_ranks > 0 and channels % self.num_ranks == 0)


ONE_RANK = NormPolicy()
"""Nothing is sharded: there is one rank."""


@as_phase
def choose_norm_policy(joint: JointGraph, mesh: Mesh, pins: Pins) -> NormPolicy:
    """The norm policy of a stage on `mesh`, where `pins` are the layouts that are fixed beforehand.

    With two axes, weights that are sharded over both leave hidden dims sharded over one and the other alternately; with
    one axis, the values between pairs of layers are best replicated, unless a hint says otherwise.
    """
    sizes = [mesh.sizes[axis] for axis in AUTOMATIC_AXES if mesh.sizes[axis] > 1]
    return NormPolicy(prod(sizes), len(sizes) > 1 or (len(sizes) > 0 and _hints_shard_hidden(joint, pins)))


def _hints_shard_hidden(joint: JointGraph, pins: Pins) -> bool:
    """Whether a hint shards what a layer norm normalises: one on its weight, or on a value of the same width."""
    norms = [node for node in joint.module.graph.nodes if node.target in LAYER_NORMS]
    widths = {tensor(node.all_input_nodes[0]).shape[-1] for node in norms}
    return any(_is_hidden(node, pin, widths) for node, pin in _pinned(joint, pins))


def _pinned(joint: JointGraph, pins: Pins) -> list[tuple[fx.Node, Pin]]:
    """Edges, weights of layer norms, embedding tables and hinted activations that have pins, with these."""
    found: list[tuple[fx.Node, Pin]] = []
    for node, port in zip(joint.module.graph.find_nodes(op="placeholder"), joint.inputs, strict=False):
        reads_rows = any(user.target in LAYER_NORMS or user.target is aten.embedding.default for user in node.users)
        if port in pins.inputs and (port.kind is not PortKind.PARAMETER or reads_rows):
            found.append((node, pins.inputs[port]))
    for node in joint.module.graph.find_nodes(op="call_function", target=torch.ops.fxpar.shard.default):
        found.append((node, Pin.hinted(json.loads(str(node.args[1])))))
    return found


def _is_hidden(node: fx.Node, pin: Pin, widths: set[int]) -> bool:
    """Whether `pin` shards the last dim of `node`, which is as long as one of `widths`."""
    shape = tensor(node).shape
    return len(shape) > 0 and shape[-1] in widths and any(dim == len(shape) - 1 for dim, _ in pin.shards.values())
