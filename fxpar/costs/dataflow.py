"""A joint graph as operations and values: tuples are split into their results, and ports are operations, too."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fxpar.ir import node_meta
from fxpar.ir.op_predicates import is_random, is_view
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.rules.call import op_call
from fxpar.rules.rule import OpCall

aten = torch.ops.aten


class Value(NamedTuple):
    """Result number `result` of `node`."""

    node: fx.Node
    result: int = 0

    @property
    def tensor(self) -> Tensor:
        """The fake tensor, in logical shape."""
        found = node_meta.value(self.node)
        tensor = found[self.result] if isinstance(found, tuple | list) else found
        assert isinstance(tensor, torch.Tensor), f"result {self.result} of {self.node} is no tensor"
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensor."""
        return self.tensor.numel() * self.tensor.element_size()


class Border(Enum):
    """On which side of the stage a port is."""

    INPUT = "input"
    TANGENT = "tangent"
    OUTPUT = "output"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Operation:
    """Something that takes operands and returns results in layouts that are to be chosen.

    It is an op (`call` is set), a constant of the module, or a port of the stage: an entering port has one result and
    no operands, a leaving one has one operand and no results. `results` has None for each that is not a tensor.
    """

    node: fx.Node
    operands: tuple[Value, ...]
    results: tuple[Value | None, ...]
    call: OpCall | None = None
    border: Border | None = None
    port: Port | None = None

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """Operands, then results that are tensors."""
        return (*self.operands, *(result for result in self.results if result is not None))

    @property
    def is_view(self) -> bool:
        """Whether the op only returns a view of its operand, at no cost."""
        return is_view(self.node.target)

    @cached_property
    def signature(self) -> str:
        """All that a rule or a price depends on, as text: target, arguments, shapes and dtypes."""
        args, kwargs = ("", "") if self.call is None else fx.map_arg((self.node.args, self.node.kwargs), lambda _: "%")
        tensors = [
            None if value is None else f"{value.tensor.dtype}{list(value.tensor.shape)}"
            for value in (*self.operands, *self.results)
        ]
        return f"{self.node.target if self.call else self.node.op} {args} {kwargs} {len(self.operands)} {tensors}"

    def is_parameter(self, border: Border) -> bool:
        """Whether this is a parameter's port on that side of the stage."""
        return self.border is border and self.port is not None and self.port.kind is PortKind.PARAMETER

    def __str__(self) -> str:
        if self.port is not None and self.border is not None:
            return f"{self.border.value} {self.port}"
        path = node_meta.module_path(self.node)
        return f"{self.node.target} ({self.node.name}{' in ' + path if path else ''})"


def producer(node: fx.Node) -> Value:
    """The value that a node stands for; for a getitem, a result of the node that made the tuple."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int), f"unexpected item {node.format_node()}"
        return Value(source, index)
    return Value(node)


def operands(node: fx.Node) -> tuple[Value, ...]:
    """The tensors that a node uses, with repeats, as flattened from (args, kwargs)."""
    return tuple(map(producer, node_meta.tensor_operands(node)))


def operations(joint: JointGraph) -> list[Operation]:
    """Every operation of the graph, in an order in which values are made before they are used."""
    entering = iter(
        [(Border.INPUT, port) for port in joint.inputs] + [(Border.TANGENT, port) for port in joint.tangents]
    )
    found: list[Operation] = []
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            border, port = next(entering)
            found.append(Operation(node, (), (Value(node),), border=border, port=port))
        elif node.op == "call_function" and node.target is not operator.getitem:
            found.append(operation_of_call(node))
        elif node.op == "get_attr":
            found.append(Operation(node, (), (Value(node),)))
        elif node.op == "output":
            found += _leaving(joint, node)
    return found


def operation_of_call(node: fx.Node) -> Operation:
    """What a node that calls an op does."""
    call = op_call(node)
    results = tuple(None if shape is None else Value(node, i) for i, shape in enumerate(call.outputs))
    return Operation(node, operands(node), results, call)


def _leaving(joint: JointGraph, output: fx.Node) -> list[Operation]:
    ports = [(Border.OUTPUT, port) for port in joint.outputs] + [(Border.GRADIENT, port) for port in joint.gradients]
    (values,) = output.args
    assert isinstance(values, tuple | list)
    return [
        Operation(output, (producer(value),), (), border=border, port=port)
        for (border, port), value in zip(ports, values, strict=True)
        if isinstance(value, fx.Node)
    ]


def roots(program: Sequence[Operation]) -> dict[Value, Value]:
    """For each value, the value whose storage it views."""
    found: dict[Value, Value] = {}
    for operation in program:
        for result in operation.results:
            if result is not None:
                found[result] = found[operation.operands[0]] if operation.is_view else result
    return found


SMALL_BYTES = 4 << 20
"""Up to this size a value that depends on inputs alone is computed whole by every rank."""


def small_constants(program: Sequence[Operation]) -> set[fx.Node]:
    """Ops whose results depend on inputs and constants alone (masks, positions, rotary tables), and are small.

    Random ops are left out, since they are not cheap.
    """
    constant: set[fx.Node] = set()
    for operation in program:
        is_source = operation.border is None or (operation.border is Border.INPUT and _is_data(operation.port))
        if (
            is_source
            and not is_random(operation.node.target)
            and all(value.node in constant for value in operation.operands)
        ):
            constant.add(operation.node)
    return {
        operation.node
        for operation in program
        if operation.call is not None
        and operation.node in constant
        and all(value.num_bytes <= SMALL_BYTES for value in operation.values)
    }


def _is_data(port: Port | None) -> bool:
    return port is not None and port.kind in (PortKind.INPUT, PortKind.BUFFER)


def derived_from(program: Sequence[Operation], sources: set[fx.Node]) -> dict[Value, tuple[Port, ...]]:
    """The values of the placeholders `sources` and all that is computed from them alone, with their ports."""
    found: dict[Value, tuple[Port, ...]] = {}
    for operation in program:
        ports: tuple[Port, ...] = ()
        if operation.node in sources and operation.port is not None:
            ports = (operation.port,)
        elif operation.operands and all(value in found for value in operation.operands):
            ports = tuple(dict.fromkeys(port for value in operation.operands for port in found[value]))
        if ports:
            found.update((result, ports) for result in operation.results if result is not None)
    return found
