"""Dynamo traces equal layers of a model once: the calls of the others become copies of what it traced.

Dynamo guards all that it reads of a layer. Another one of which the same guards hold, called with equal arguments in
equal modes, would be traced to the same operations, so these are copied, and the guards are installed for it as well.
(torch's `nested_compile_region` does the same for regions that users mark, which stay calls of subgraphs.) What changed
objects that existed before the trace, or that it made and keeps where layers may find them, is never copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.variables import UnspecializedNNModuleVariable
from torch._dynamo.variables.base import VariableTracker

from fxpar._torch.dynamo.descriptions import NotEqualError
from fxpar._torch.dynamo.known_values import values_known_behind
from fxpar._torch.dynamo.layer_call import LayerCall
from fxpar._torch.dynamo.layer_copy import LayerCopy
from fxpar._torch.dynamo.traced_layer import TracedLayer, describe_trace
from fxpar._torch.dynamo.traced_parameters import trace_parameters


class Layers:
    """The layers of a model: modules with siblings of the same class, and with modules of their own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._output: Any = None
        self._is_tracing = False
        self._forget()

    @contextmanager
    def traced_once(self) -> Iterator[None]:
        """Within, Dynamo traces equal layers of the model once."""
        token = _layers.set(self)
        try:
            yield
        finally:
            _layers.reset(token)
            self._forget()

    def _forget(self, output: Any = None) -> None:
        """Begin anew, for a trace with this `OutputGraph`."""
        self._output = output
        self._traced: dict[tuple[int, str], list[TracedLayer]] = {}

    @cached_property
    def _kinds(self) -> dict[int, tuple[int, str]]:
        """For the id of each layer: that of its parent, and the name of its class."""
        found: dict[int, tuple[int, str]] = {}
        for parent in self._model.modules():
            siblings: dict[str, list[nn.Module]] = {}
            for child in parent.children():
                siblings.setdefault(torch.typename(child), []).append(child)
            for name, children in siblings.items():
                if len(children) > 1:
                    found |= {id(child): (id(parent), name) for child in children if next(child.children(), None)}
        return found

    def call(self, layer: UnspecializedNNModuleVariable, tx: Any, args: Any, kwargs: Any, trace: Any) -> Any:
        """The result of calling `layer`: a copy of what was traced for an equal one, or that of `trace`."""
        kind = self._kinds.get(id(layer.value))
        if kind is None or self._is_tracing or layer.source is None or _is_within_another(tx):
            return trace(layer, tx, args, kwargs)
        if tx.output is not self._output:  # another trace, or Dynamo has begun anew
            self._forget(tx.output)
        known = self._traced.setdefault(kind, [])
        try:
            call = LayerCall(layer, tx, args, kwargs)
        except NotEqualError:
            return trace(layer, tx, args, kwargs)
        for traced in known:
            try:
                copy = LayerCopy(traced, call)
            except NotEqualError:
                continue
            return copy.write()
        return self._trace(call, known, trace)

    def _trace(self, call: LayerCall, known: list[TracedLayer], trace: Any) -> Any:
        """The result of `trace`, which is added to `known` if later calls may copy it."""
        output = call.tx.output
        tracer, last = output.current_tracer, next(iter(reversed(output.graph.nodes)), None)
        others = tracer.traced_sources
        tracer.traced_sources, self._is_tracing = type(others)(), True
        try:
            with values_known_behind(output, last):
                result = trace(call.layer, call.tx, call.args, call.kwargs)
        finally:
            own, self._is_tracing = tracer.traced_sources, False
            others.update(own)
            tracer.traced_sources = others
        with suppress(NotEqualError):
            known.append(describe_trace(call, _behind(last, output.graph), own, result))
        return result


_layers: ContextVar[Layers | None] = ContextVar("the layers that Dynamo traces once", default=None)


def _is_within_another(tx: Any) -> bool:
    """Whether what is traced is a part of another graph, or of a transform of `torch.func`, which wraps all values."""
    return tx.output.current_tracer.parent is not None or torch._C._functorch.peek_interpreter_stack() is not None


def _behind(last: fx.Node | None, graph: fx.Graph) -> list[fx.Node]:
    """The nodes behind `last`, in order; inputs are inserted further in front."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        found.append(node)
    return [node for node in reversed(found) if node.op != "placeholder"]


def _ask_layers() -> None:
    """Let Dynamo ask the layers of the model that is traced, when it calls a module."""
    trace = UnspecializedNNModuleVariable.call_function

    def call_function(
        self: UnspecializedNNModuleVariable, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        layers = _layers.get()
        if layers is None:
            return trace(self, tx, args, kwargs)
        called: VariableTracker = layers.call(self, tx, args, kwargs, trace)
        return called

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]


_ask_layers()
trace_parameters()
