"""A forward that assigns a registered buffer changes it in place, as one that calls its `copy_` does."""

import functools
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import UnspecializedParamBufferSource
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable

from fxpar._torch.compiler import storage_of


@functools.cache
def copy_assigned_buffers() -> None:
    """Let traces of distributed models end with copies, into registered buffers, of what was assigned to these.

    Dynamo would let the compiled function return what is assigned, for the module to hold from then on. But no function
    returns what a step has of one microbatch after another; a change in place, the stage that makes it can keep.
    """
    compile_subgraph = OutputGraph.compile_subgraph

    def copy_and_compile(self: OutputGraph, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_exit, self.graph.nodes)):
            _copy_assigned(self, tx)
        return compile_subgraph(self, tx, *args, **kwargs)

    OutputGraph.compile_subgraph = copy_and_compile  # type: ignore[method-assign]


def _copy_assigned(output: OutputGraph, tx: Any) -> None:
    effects = output.side_effects
    variables: list[Any] = list(effects.id_to_variable.values())
    changed = [each for each in variables if _are_buffers(each) and effects.is_modified(each)]
    assigned = [(buffers, *each) for buffers in changed for each in _assigned(buffers)]
    # Cloned, as one buffer may be assigned what another one holds.
    copies = [_copy(tx, value, _node(registered)) for _, _, registered, value in assigned]
    for (buffers, key, registered, value), copy in zip(assigned, copies, strict=True):
        buffer = _node(registered)
        if _node(value) is not buffer:  # the same where an op has written to `out=self.buffer`
            _return_copies(buffer)
            _call_behind(_readers(buffer), tx, registered, "copy_", copy)
        buffers.items[key] = registered


def _copy(tx: Any, value: VariableTracker, buffer: fx.Node) -> VariableTracker:
    """A copy of what a buffer is assigned, made where the buffer is last read: in the stage that has it."""
    detached = _call_behind(_readers(buffer), tx, value, "detach")
    return _call_behind(set(), tx, detached, "clone")


def _call_behind(
    nodes: Set[fx.Node], tx: Any, tensor: VariableTracker, method: str, *args: VariableTracker
) -> VariableTracker:
    """Call a method of a tensor behind the last of its arguments and some other nodes, and in the module of that."""
    called = tensor.call_method(tx, method, [*args], {})
    node = _node(called)
    before = {*nodes, *node.all_input_nodes} - {node}
    last = next(each for each in reversed(node.graph.nodes) if each in before or each.op == "placeholder")
    last.append(node)
    for name in ("nn_module_stack", "stack_trace"):
        if name in last.meta:
            node.meta[name] = last.meta[name]
    return called


def _return_copies(buffer: fx.Node) -> None:
    """Let the forward return what was in the memory of a buffer, not what will be there."""
    for result in filter(_is_exit, _readers(buffer)):
        held = result.args[0]
        assert isinstance(held, fx.Node)
        with buffer.graph.inserting_before(result):
            copy = buffer.graph.call_method("clone", (held,))
        copy.meta.update(held.meta, example_value=_example(held).clone())
        result.replace_input_with(held, copy)


def _is_exit(node: fx.Node) -> bool:
    return str(node.target).startswith("fxpar.exit")


def _readers(buffer: fx.Node) -> set[fx.Node]:
    """The nodes that read the memory of a buffer."""
    storage = storage_of(_example(buffer))
    aliases = [each for each in buffer.graph.nodes if _is_tensor(each) and storage_of(_example(each)) == storage]
    return {user for each in aliases for user in each.users}


def _node(variable: VariableTracker) -> fx.Node:
    node: fx.Node = variable.as_proxy().node
    return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _example(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["example_value"]
    return value


def _are_buffers(variable: Any) -> bool:
    """Whether this is the dictionary of a module's buffers."""
    source = variable.source
    is_of_module = isinstance(source, UnspecializedParamBufferSource) and source.member == "_buffers"
    return is_of_module and isinstance(variable, ConstDictVariable)


def _assigned(buffers: Any) -> Iterator[tuple[Any, TensorVariable, TensorVariable]]:
    """The keys of buffers that were assigned another tensor of their shape and type, and both tensors."""
    registered = {key.as_python_constant(): each for key, each in buffers.original_items.items()}
    for key, value in buffers.items.items():
        before = registered.get(key.vt.as_python_constant())
        if before is not None and buffers.is_new_item(before, value):
            before, value = before.realize(), value.realize()
            if _is_alike(before, value):
                yield key, before, value


def _is_alike(before: VariableTracker, after: VariableTracker) -> bool:
    if not isinstance(before, TensorVariable) or not isinstance(after, TensorVariable):
        return False
    old, new = _example(_node(before)), _example(_node(after))
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
