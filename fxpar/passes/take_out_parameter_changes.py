"""Take changes of parameters in place, such as clamping them, out of a forward: they are made once, before each step.

A stage runs once per microbatch, and its graph takes parameters gathered, in another dtype or from another stage. So
what a forward does to a parameter itself is taken out of its graph, and runs before the first microbatch. That computes
the same if nothing has read the parameter before, and if the new value depends on no argument and no buffer. If it is
pointwise, a rank changes its shard alone; otherwise it computes the whole parameter.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxpar.errors import UnsupportedGraphError
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import where
from fxpar.ir.stage import Port, PortKind
from fxpar.passes.lasting_changes import LastingChanges
from fxpar.progress.phases import as_phase


@as_phase
def take_out_parameter_changes(capture: Capture) -> Capture:
    """The capture without changes of parameters in place, which are among its `parameter_changes` instead.

    Before: `w = param(...); w.detach().clamp_(-1, 1); y = linear(x, w)`
    After:  `w = param(...); y = linear(x, w)`, and the change `w -> clamp(w, -1, 1)`

    Raises:
        UnsupportedGraphError: the new value depends on something else than parameters and constants, or is random; or
            the parameter is read before it is changed.
    """
    if not LastingChanges(capture, PortKind.PARAMETER).changes:
        return capture
    capture = capture.copied()
    found = LastingChanges(capture, PortKind.PARAMETER)
    closures = {port: _closure(found, port) for port in found.changes}
    every = set().union(*closures.values())
    _check_reads(found, every)
    changes = tuple(found.change(port, closure) for port, closure in closures.items())
    replaced = _remove(found, every, capture)
    results = [replaced.get(node, node) for node in capture.results]
    return replace(capture, parameter_changes=changes, results=results)


def _closure(found: LastingChanges, port: Port) -> set[fx.Node]:
    closure = found.closure(port)
    if any(each is None or each.kind is not PortKind.PARAMETER for each in found.sources_in(closure)):
        raise _unsupported(port, where(found.last(port)), "its new value depends on more than parameters")
    for node in closure:
        operands = found.operands(node)
        if len(operands) > 1 or (operands and node.users and node not in found.of):
            raise _unsupported(port, where(node), "the operation does more than that")
    return closure


def _check_reads(found: LastingChanges, closure: set[fx.Node]) -> None:
    """Check that nothing but `closure` has read a parameter before it is changed for the last time."""
    kept = {node for node in found.order if node not in closure}
    for node in reversed(found.order):
        if node in closure and not found.operands(node) and any(user in kept for user in node.users):
            kept.add(node)
    for node in found.order:
        if node in kept and node not in found.of:
            for used in node.all_input_nodes:
                port = found.of.get(used)
                if port in found.changes and found.place[node] < found.place[found.last(port)]:
                    raise _unsupported(port, where(found.last(port)), f"{where(node)} has read it before")


def _remove(found: LastingChanges, closure: set[fx.Node], capture: Capture) -> dict[fx.Node, fx.Node]:
    """Remove the changes, and what nothing else needs of the rest of `closure`.

    Returns the nodes that take the places of the changes.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for node in found.order:
        if node in closure and (operands := found.operands(node)):
            replaced[node] = replaced.get(operands[0], operands[0])
            node.replace_all_uses_with(replaced[node])
    for node in reversed(found.order):
        if node in closure and node not in capture.sources and not node.users:
            capture.module.graph.erase_node(node)
    capture.module.recompile()
    return replaced


def _unsupported(port: Port, line: str, reason: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"{line} changes parameter {port.name} in place, and {reason}: expected changes that depend on parameters "
        "alone, before the forward reads them; write the operation out of place, or change "
        "parameters between steps"
    )
