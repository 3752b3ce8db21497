"""What a call of a layer was traced to, and the conditions under which an equal layer would be traced to the same."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._dynamo.guards import GUARD_VALUE_DISPATCH, GuardCheckSpec
from torch._guards import Guard, Source

from fxpar._torch.dynamo.descriptions import NotEqualError
from fxpar._torch.dynamo.layer_call import LayerCall, is_plain, returned_nodes
from fxpar._torch.dynamo.traced_parameters import parameters_read
from fxpar._torch.dynamo.traced_property import are_equal_classes, name_of


@dataclass(frozen=True)
class TracedLayer:
    """A call of a layer, and what Dynamo traced it to.

    depth: how many modules were being called around it.
    nodes: the operations.
    properties: of those that read a `TracedProperty`, the path of its module in the layer, and its name.
    guards: on all that belongs to the layer, with the check of a value and the expected one; no check where two places
        must hold the same object.
    unguarded: what was read of the layer without a guard.
    result: the nodes that it returns, and whether as a tuple.
    """

    call: LayerCall
    depth: int
    nodes: tuple[fx.Node, ...]
    properties: Mapping[fx.Node, tuple[str, str]]
    guards: Sequence[tuple[Guard, GuardCheckSpec | None, Any]]
    unguarded: Sequence[tuple[Source, Any]]
    result: Sequence[fx.Node]
    is_tuple: bool


def describe_trace(
    call: LayerCall,
    nodes: Sequence[fx.Node],
    sources: Iterable[Source],
    result: Any,
) -> TracedLayer:
    """What `call` was traced to.

    Args:
        nodes: the operations.
        sources: where Dynamo found what it read.
        result: what the call returns.

    Raises:
        NotEqualError: no other call may be taken for this one: it had effects, calls subgraphs, uses values that it was
            not given, lists parameters, or depends on something whose equality cannot be checked.
    """
    read = parameters_read(call.tx.output)
    if call.effects_so_far() != call.effects or not call.modes.check() or read.listings != call.listings:
        raise NotEqualError
    known = {*nodes, *call.inputs}
    for node in nodes:
        if node.op not in ("call_function", "call_method") or not is_plain(node.meta.get("example_value")):
            raise NotEqualError
        if any(used not in known and used.op != "placeholder" for used in node.all_input_nodes):
            raise NotEqualError
    guards = [_checkable(guard, call) for guard in call.tx.output.guards if call.owns(guard.originating_source)]
    guarded = {guard.originating_source.name for guard, _, _ in guards}  # modules have sources of two classes
    unguarded = [source for source in sources if call.owns(source) and source.name not in guarded]
    paths = {id(module): path for path, module in call.module.named_modules()}
    found = {node: read.nodes[node] for node in nodes if node in read.nodes and id(read.nodes[node][0]) in paths}
    return TracedLayer(
        call,
        len(call.tx.nn_module_stack),
        tuple(nodes),
        {node: (paths[id(module)], name_of(each, module)) for node, (module, each) in found.items()},
        guards,
        [(source, call.resolve(source)) for source in unguarded],
        *returned_nodes(result, set(nodes)),
    )


def _checkable(guard: Guard, call: LayerCall) -> tuple[Guard, GuardCheckSpec | None, Any]:
    kind = guard.create_fn_name()
    if kind == "DUPLICATE_INPUT":
        return guard, None, None
    value = call.resolve(guard.originating_source)
    if kind == "TYPE_MATCH":
        return guard, GuardCheckSpec(None, _is_of_equal_class), type(value)
    check = GUARD_VALUE_DISPATCH.get(kind)
    if not isinstance(check, GuardCheckSpec):
        raise NotEqualError
    return guard, check, check.get_metadata_fn(guard, value)


def _is_of_equal_class(value: object, expected: type) -> bool:
    return are_equal_classes(type(value), expected)


def other_place(guard: Guard) -> Source:
    """Of a guard without a check: where the same object must be found."""
    assert isinstance(guard.create_fn, functools.partial), f"{guard} holds no source"
    source: Source = guard.create_fn.keywords["source_b"]
    return source
