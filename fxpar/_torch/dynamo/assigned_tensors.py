"""What becomes of tensors that a forward assigns to attributes of modules and other objects.

A registered buffer is changed in place, as by its `copy_`. An attribute that the forward has read before would be read
by the next one, too, which no step can serve. Others have stand-ins after the forward.
"""

import functools
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, UnspecializedParamBufferSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable

from fxpar._torch.compiler import storage_of

_CARRIED_OVER = "_fxpar_carried_over"


@functools.cache
def settle_assignments() -> None:
    """Let traces of distributed models end with copies, into registered buffers, of what was assigned to these.

    Dynamo would let the compiled function return what is assigned, for the module to hold from then on. But no function
    returns what a step has of one microbatch after another; a change in place, the stage that makes it can keep.
    """
    compile_subgraph = OutputGraph.compile_subgraph

    def copy_and_compile(self: OutputGraph, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_exit, self.graph.nodes)):
            _copy_assigned(self, tx)
            vars(self)[_CARRIED_OVER] = list(_carried_over(self))
        return compile_subgraph(self, tx, *args, **kwargs)

    OutputGraph.compile_subgraph = copy_and_compile  # type: ignore[method-assign]


def carried_over() -> list[fx.Node]:
    """What a trace assigns to attributes that it has read before; to be called while Dynamo calls the backend."""
    found: list[fx.Node] = vars(InstructionTranslator.current_tx().output).get(_CARRIED_OVER, [])
    return found


def _carried_over(output: OutputGraph) -> Iterator[fx.Node]:
    """As `carried_over`. What an op has changed in place is the attribute's own tensor, and need not be assigned."""
    read = {node.meta["grapharg"].source: node for node in output.graph.find_nodes(op="placeholder")}
    for changed, attributes in output.side_effects.store_attr_mutations.items():
        if changed.source is None:
            continue
        assigned = {name: each for name, each in attributes.items() if isinstance(each.realize(), TensorVariable)}
        for name, value in assigned.items():
            before, after = read.get(AttrSource(changed.source, name)), _node(value)
            if before is not None and _is_same(before, after):
                del attributes[name]
            elif before is not None:
                yield after


def _copy_assigned(output: OutputGraph, tx: Any) -> None:
    effects = output.side_effects
    variables: list[Any] = list(effects.id_to_variable.values())
    changed = [each for each in variables if _are_buffers(each) and effects.is_modified(each)]
    assigned = []
    for buffers in changed:
        for key, registered, value in _assigned(buffers):
            if _is_same(_node(registered), _node(value)):
                buffers.items[key] = registered
            else:
                assigned.append((buffers, key, registered, value))
    # Cloned, as one buffer may be assigned what another one holds.
    copies = [_copy(tx, value, _node(registered)) for _, _, registered, value in assigned]
    for (buffers, key, registered, _), copy in zip(assigned, copies, strict=True):
        buffer = _node(registered)
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


def _is_same(before: fx.Node, after: fx.Node) -> bool:
    """Whether a node returns the tensor of another one, changed in place: as `self.tensor += 1`, or by `out=`."""
    old, new = _example(before), _example(after)
    where = [(storage_of(each), each.storage_offset(), each.shape, each.stride(), each.dtype) for each in (old, new)]
    return where[0] == where[1]


def _is_alike(before: VariableTracker, after: VariableTracker) -> bool:
    if not isinstance(before, TensorVariable) or not isinstance(after, TensorVariable):
        return False
    old, new = _example(_node(before)), _example(_node(after))
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
