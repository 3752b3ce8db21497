"""Let a forward that changes an argument in place change a copy of its microbatch, and the argument after the step.

Every stage reads the arguments that it needs for itself, so a change in one stage would not be seen in another one. A
copy is a value like any other: stages repeat what depends on arguments alone, and send the rest.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxpar.errors import UnsupportedGraphError
from fxpar.ir.capture import Capture
from fxpar.ir.changes import Change
from fxpar.ir.node_meta import known_value, where
from fxpar.ir.stage import Port, PortKind
from fxpar.passes.lasting_changes import LastingChanges
from fxpar.progress.phases import as_phase


@as_phase
def copy_changed_arguments(capture: Capture) -> Capture:
    """The capture in which what the forward changes of its arguments are copies, with its `argument_changes`.

    Before: `x = enter(...); x[:, 0] = 0; y = linear(x, w)`
    After:  `x = enter(...); z = x.clone(); z[:, 0] = 0; y = linear(z, w)`, and the change `x -> x with zeros`

    Raises:
        UnsupportedGraphError: what an argument becomes depends on parameters, buffers or random numbers; or the
            argument is shared by all microbatches, and depends on one that is not.
    """
    if not LastingChanges(capture, PortKind.INPUT).changes:
        return capture
    capture = capture.copied()
    found = LastingChanges(capture, PortKind.INPUT)
    changes = tuple(_change(found, port, capture) for port in found.changes)
    for node, port in capture.sources.items():
        if port in found.changes:
            _copy(node)
    capture.module.recompile()
    return replace(capture, argument_changes=changes)


def _change(found: LastingChanges, port: Port, capture: Capture) -> Change:
    closure = found.closure(port)
    if port.name in capture.differentiated:
        raise UnsupportedGraphError(
            f"{where(found.last(port))} changes an argument of the forward in place that requires grad: expected "
            "changes of arguments without gradients alone; change a copy, x = x.clone()"
        )
    is_shared = port not in capture.batch_dims
    if any(
        each is None or each.kind is not PortKind.INPUT or (is_shared and each in capture.batch_dims)
        for each in found.sources_in(closure)
    ):
        raise UnsupportedGraphError(
            f"{where(found.last(port))} changes an argument of the forward in place, to what depends on more than "
            "arguments that are split into microbatches as it is: expected changes by arguments and constants alone; "
            "change a copy, x = x.clone()"
        )
    return found.change(port, closure)


def _copy(source: fx.Node) -> None:
    """Let all that reads `source` read a copy, whose memory is that of its views."""
    with source.graph.inserting_after(source):
        copy = source.graph.call_method("clone", (source,))
    copy.meta = dict(source.meta)
    value = known_value(source)
    with value.fake_mode, torch.no_grad():
        source.meta["example_value"] = value.clone().requires_grad_(value.requires_grad)
    source.replace_all_uses_with(copy, lambda user: user is not copy)
