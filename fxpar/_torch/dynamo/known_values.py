"""Numbers and conditions that a forward computes of constants alone are known while Dynamo traces it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fxpar._torch.compiler import TorchDispatchMode, traces_wider
from fxpar._torch.dynamo.jumps import Jump, change_jumps, truth_of_tensor

_READS_NUMBERS = ("item", "tolist")

_OWN_MODULES = ("torch", "_operator", "builtins", "math")

_CONSTANTS = "_fxpar_constants"


@functools.cache
def trace_by_known_values() -> None:
    """Let Dynamo take branches, and read numbers, by the values of tensors that depend on no input, where it can.

    Such are `torch.linspace(0, 1, n)[1] > 0.5` and `torch.tensor(sizes).prod().item()`. It does so within
    `wider_tracing`; for other tensors it does what it did.
    """
    change_jumps(_by_known_conditions)
    call_method = TensorVariable.call_method

    def call_known_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _READS_NUMBERS and traces_wider() and (known := _value(tx, self)) is not None:
            return VariableTracker.build(tx, getattr(known, name)())
        return call_method(self, tx, name, args, kwargs)

    TensorVariable.call_method = call_known_method  # type: ignore[method-assign]


def _by_known_conditions(jump: Jump, jumps_if: bool) -> Jump:
    def run(self: Any, inst: Instruction) -> None:
        condition = truth_of_tensor(self.stack[-1]) if traces_wider() else None
        if condition is not None and (known := _value(self, condition)) is not None:
            self.pop()
            self.push(ConstantVariable.create(bool(known)))
        jump(self, inst)

    return run


@contextmanager
def values_known_behind(output: Any, last: fx.Node | None) -> Iterator[None]:
    """Within, no values are known of what the graph of `output` computes up to `last`: other calls are given others."""
    before = vars(output).get(_CONSTANTS)
    vars(output)[_CONSTANTS] = _Constants(last)
    try:
        yield
    finally:
        vars(output)[_CONSTANTS] = before or _Constants()


def _value(tx: Any, variable: VariableTracker) -> Tensor | None:
    """The value of a tensor of a trace; None where it depends on inputs, parameters or random numbers."""
    last: fx.Node = variable.as_proxy().node
    known = vars(tx.output).setdefault(_CONSTANTS, _Constants()).of(last.graph)
    if last not in known or torch._C._functorch.peek_interpreter_stack() is not None:  # it would take part in a vmap
        return None
    values: dict[fx.Node, Any] = {}
    connected = _connected(last, known)
    try:
        with unset_fake_temporarily(), torch.no_grad(), _Repeatable():
            for node in known:
                if node in connected:
                    values[node] = _computed(node, values)
    except Exception:  # of whatever kernel; Dynamo traces it as it can
        return None
    is_changed_by_others = any(_version(node.meta.get("example_value")) != _version(values[node]) for node in values)
    found = values[last]
    return found if isinstance(found, Tensor) and not is_changed_by_others else None


class _Constants:
    """The calls in the graphs of a trace that are given nothing but results of such calls.

    behind: of the graph that this node is in, those behind it.
    """

    def __init__(self, behind: fx.Node | None = None) -> None:
        self._behind = behind
        self._seen: dict[fx.Graph, tuple[fx.Node, dict[fx.Node, None]]] = {}

    def of(self, graph: fx.Graph) -> Mapping[fx.Node, None]:
        """Those of `graph` so far, in order; a trace appends to its graphs."""
        last, found = self._seen.get(graph, (graph._root, {}))
        if last._erased:
            last, found = graph._root, {}
        for node in _after(last, graph):
            last = node
            if _is_torchs(node) and self._is_behind(node) and all(used in found for used in node.all_input_nodes):
                found[node] = None
        self._seen[graph] = last, found
        return found

    def _is_behind(self, node: fx.Node) -> bool:
        return self._behind is None or self._behind.graph is not node.graph or self._behind < node


def _after(last: fx.Node, graph: fx.Graph) -> Iterator[fx.Node]:
    node = last.next
    while node is not graph._root:
        yield node
        node = node.next


def _is_torchs(node: fx.Node) -> bool:
    """Whether it is a call that takes all it computes with from its arguments; markers of fxpar do not."""
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(node.target).partition(".")[0] in ("aten", "prims")
    module: str = getattr(node.target, "__module__", None) or ""
    return node.op == "call_method" or (node.op == "call_function" and module.partition(".")[0] in _OWN_MODULES)


def _connected(last: fx.Node, known: Mapping[fx.Node, None]) -> set[fx.Node]:
    """What `last` depends on, and what else is done with that, which may change it in place."""
    found: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if node in known and node not in found:
            found.add(node)
            pending += [*node.all_input_nodes, *node.users]
    return found


def _version(value: Any) -> int:
    """How often a tensor, or what it is a view of, was changed in place."""
    return value._version if isinstance(value, Tensor) else 0


class _Repeatable(TorchDispatchMode):
    """A mode in which ops that draw random numbers raise an error."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError("a random number is no constant")
        return func(*args, **(kwargs or {}))


def _computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)
