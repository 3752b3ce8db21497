"""Find the values of a local graph that are weights, gathered from their shards."""

from __future__ import annotations

from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar.ir.node_meta import communication, is_backward
from fxpar.ir.stage import JointGraph, PortKind


def made_of_parameters(joint: JointGraph) -> list[fx.Node]:
    """What the forward computes from parameters alone, in order."""
    graph = joint.module.graph
    entering = zip(graph.find_nodes(op="placeholder"), joint.inputs, strict=False)
    known = {node for node, port in entering if port.kind is PortKind.PARAMETER}
    found = []
    for node in graph.nodes:
        operands = node.all_input_nodes
        if node.op == "call_function" and not is_backward(node) and operands and known.issuperset(operands):
            known.add(node)
            found.append(node)
    return found


def is_gathered(node: fx.Node) -> bool:
    """Whether `node`, computed from parameters alone, is the wait for a weight that this graph gathers."""
    return node.target is c10d_functional.wait_tensor.default and communication(node.all_input_nodes[0]) is not None
