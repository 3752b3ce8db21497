"""Read the graph that Dynamo captures: its inputs, its results, and the distributed model that it belongs to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import graph_arguments
from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.dynamo.assigned_tensors import carried_over
from fxpar._torch.dynamo.grad_mode import reads_of_grad_mode
from fxpar._torch.dynamo.world_of_one import collectives_called
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.environment import is_first_rank
from fxpar.errors import (
    CollectiveInForwardError,
    CollectiveInForwardWarning,
    FxparError,
    GraphBreakError,
    UnavailableTensorError,
    UnsupportedGraphError,
)
from fxpar.ir.attention_dropout import define_attention_dropout
from fxpar.ir.batch_totals import BatchTotals
from fxpar.ir.canonical_names import with_canonical_names
from fxpar.ir.changes import Change
from fxpar.ir.dense_gradients import make_gradients_dense
from fxpar.ir.embedding_bags import write_out_bags
from fxpar.ir.failed_trace import error_of_graph_break
from fxpar.ir.flex_attention import hold_flex_graphs
from fxpar.ir.held_graphs import HoldingCall, hold_graphs
from fxpar.ir.inline_checkpoints import inline_checkpoints
from fxpar.ir.inner_gradients import without_leaves, write_out_gradients
from fxpar.ir.lift_parameters import lift_parameters
from fxpar.ir.markers import PLAIN, is_marker
from fxpar.ir.masked_assignment import assign_at_all_places
from fxpar.ir.node_meta import module_path, source_line
from fxpar.ir.numbers_as_tensors import keep_numbers_as_tensors
from fxpar.ir.out_of_place import write_out_of_place
from fxpar.ir.result_gradients import ResultGradient
from fxpar.ir.stage import Port, PortKind


@dataclass(frozen=True, eq=False)
class Capture:
    """A whole forward in torch IR, in logical shapes of one microbatch.

    model: the handle of the distributed model.
    sources: the nodes at which values enter, with their ports.
    results: the nodes that leave, in output order.
    named_loss: the position of the result that the forward calls "loss".
    arguments: the position of each input and buffer among the compiled function's arguments.
    batch_dims: the dim along which each split input is cut into microbatches of `microbatch_size` rows.
    microbatches: how many there are; None where no input is a tensor, and so as many as the user wants.
    buffers: the tensors captured as buffers.
    kept: the positions, among all that the compiled function returns, of tensors that the forward keeps on objects,
        with the source lines.
    reads_grad_mode: whether the forward may compute something else in the other grad mode.
    totals: how to compute those of the sources that are neither parameters nor among the arguments, if any.
    numbers: those among the arguments that the trace took as constants.
    parameter_changes: what the forward does to parameters themselves, which is to be done before each step.
    argument_changes: what it does to its arguments, after each step.
    result_gradients: the inputs that are the gradients of results; the loss is made of these, and is the last result.
    """

    module: fx.GraphModule
    model: int
    sources: Mapping[fx.Node, Port]
    results: Sequence[fx.Node]
    named_loss: int | None
    arguments: Mapping[Port, int]
    batch_dims: Mapping[Port, int]
    microbatch_size: int | None
    microbatches: int | None
    buffers: Mapping[Port, Tensor]
    kept: Mapping[int, str] = field(default_factory=dict)
    reads_grad_mode: bool = False
    totals: BatchTotals | None = None
    numbers: frozenset[float] = frozenset()
    parameter_changes: tuple[Change, ...] = ()
    argument_changes: tuple[Change, ...] = ()
    result_gradients: tuple[ResultGradient, ...] = ()

    def may_count_samples(self, number: float) -> bool:
        """Whether to divide a sum over samples by a constant of the trace may be to take a mean over a microbatch.

        So it is for the number of samples, and for that of their elements. What the caller gives is of no microbatch.
        """
        return number not in self.numbers and number % (self.microbatch_size or 1) == 0

    @property
    def loss(self) -> int | None:
        """The position of the loss: of the scalar results that require grad, the one called "loss", else the first."""
        return self._chosen([i for i in self._scalars if example(self.results[i]).requires_grad])

    @property
    def reported(self) -> int | None:
        """The position of what an evaluation returns as its loss: the loss, else chosen likewise from all scalars."""
        return self._chosen(self._scalars) if self.loss is None else self.loss

    @property
    def differentiable(self) -> list[int]:
        """The positions of all results that require grad."""
        values = [example(node) for node in self.results]
        return [i for i, value in enumerate(values) if value.requires_grad and value.is_floating_point()]

    def _chosen(self, positions: Sequence[int]) -> int | None:
        return self.named_loss if self.named_loss in positions else next(iter(positions), None)

    @property
    def _scalars(self) -> list[int]:
        values = [example(node) for node in self.results]
        return [i for i, value in enumerate(values) if value.dim() == 0 and value.is_floating_point()]

    @cached_property
    def signature(self) -> str:
        """A text that is the same for two captures of one program, whichever device of a host each is for.

        It has every operation with its arguments and the shapes that it returns.
        """
        return "\n".join(
            f"{_describe_call(node)} {_describe(node.meta.get('example_value'))}" for node in self.module.graph.nodes
        )

    @cached_property
    def description(self) -> str:
        """All that passes read of the program: the signature, and the module that each operation belongs to."""
        return "\n".join([self.signature, *map(module_path, self.module.graph.nodes)])

    @property
    def is_self_contained(self) -> bool:
        """Whether the description says all about the program: it has no constant tensors, and calls no ops of users.

        What an op of a user does in a trace, such as its formula for gradients, may change from launch to launch.
        """
        return all(node.op != "get_attr" and _is_torchs_own(node) for node in self.module.graph.nodes)

    @property
    def differentiated(self) -> list[str]:
        """The names of the inputs that require grad."""
        inputs = {node: port for node, port in self.sources.items() if port.kind is PortKind.INPUT}
        return [port.name for node, port in inputs.items() if example(node).requires_grad]

    @property
    def unread(self) -> list[str]:
        """The names of the inputs that nothing depends on."""
        return [port.name for node, port in self.sources.items() if port.kind is PortKind.INPUT and not node.users]

    def operations(self) -> list[fx.Node]:
        """The nodes that compute, in the order of the forward: no parameters, arguments or markers."""
        nodes = [node for node in self.module.graph.nodes if node.op not in ("placeholder", "output")]
        return [node for node in nodes if node not in self.sources and not is_marker(node, "exit")]

    def kept_nodes(self) -> dict[int, fx.Node]:
        """The nodes of what is `kept`, by position."""
        outputs = _output_nodes(self.module)
        return {position: outputs[position] for position in self.kept}

    def copied(self) -> Capture:
        """The same with a graph of its own, which may be changed."""
        graph, copies = ConcreteGraph(), dict[fx.Node, fx.Node]()
        for node in self.module.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        sources = {copies[node]: port for node, port in self.sources.items()}
        results = [copies[node] for node in self.results]
        return replace(self, module=lazy_graph_module(self.module, graph), sources=sources, results=results)

    def describe_results(self) -> str:
        """What the forward returns, for messages."""
        shapes = [f"{node.name}: {example(node).dtype} {tuple(example(node).shape)}" for node in self.results]
        return ", ".join(shapes) or "nothing"


def example(node: fx.Node) -> Tensor:
    """The fake tensor that Dynamo computed for `node`."""
    value = node.meta["example_value"]
    assert isinstance(value, torch.Tensor), f"{node} returns {type(value).__name__}, not a tensor"
    return value


_WHOLE = "return_value"
"""Dynamo's reason to end a graph where the function returns."""

_NAMESPACES_OF_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d")

_OWN_NAMESPACES = ("aten", "prims", "fxpar", "higher_order")
_OWN_MODULES = ("torch", "fxpar", "_operator", "builtins", "math")


def _is_op(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def _is_torchs_own(node: fx.Node) -> bool:
    if node.op != "call_function":
        return True
    if isinstance(node.target, HoldingCall):
        return all(map(_is_torchs_own, node.target.nodes()))
    if _is_op(node):
        return str(node.target).partition(".")[0] in _OWN_NAMESPACES
    return (getattr(node.target, "__module__", None) or "").partition(".")[0] in _OWN_MODULES


def _describe_call(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else torch.typename(node.target)
    given = fx.node.map_aggregate((node.args, node.kwargs), _without_index)
    return f"{node.op} {node.name} = {target}{given}"


def _without_index(given: object) -> Any:
    return given.type if isinstance(given, torch.device) else given


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    # Of a dim of one element, PyTorch returns this stride or that, depending on what it has computed before.
    strides = tuple(stride if size != 1 else 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    return f"{value.dtype} {tuple(value.shape)} {strides} {value.device.type} {value.requires_grad}"


def belongs_to_distributed_model(module: fx.GraphModule) -> bool:
    """Whether Dynamo's graph comes from a model that went through `fxpar.distribute`."""
    return any(is_marker(node, marker) for node in module.graph.nodes for marker in ("param", "enter", "exit"))


def read_capture(module: fx.GraphModule) -> Capture:
    """Find the borders of Dynamo's graph; to be called while Dynamo calls a backend with it.

    Raises:
        CollectiveInForwardError: the forward communicates over a group that is not that of all ranks.
        GraphBreakError: the graph has no `exit`, so the forward continues in another graph.
        RandomGeneratorError: likewise, at an op that draws random numbers from a generator object.
        UnavailableTensorError: the forward reads a tensor that an earlier one kept on an object, or keeps another one
            in the place of one that it has read.
        UnsupportedGraphError: an argument is a symbolic number, what the forward computes depends on a number in a
            tensor, it reads what requires grad from elsewhere than the modules, or it returns no tensor that is found.
    """
    for node in carried_over():
        raise UnavailableTensorError(source_line(node))
    _see_collectives(module)
    held = graph_arguments(module)
    reads_grad_mode = _reads_grad_mode(module)
    hold_flex_graphs(module)
    inline_checkpoints(module)
    lift_parameters(module)
    hold_graphs(module)
    define_attention_dropout(module)
    if not any(is_marker(node, "exit") for node in module.graph.nodes):
        raise _graph_break(module)
    _drop_unused_parameters(module)
    with without_leaves(module):
        write_out_of_place(module)
        keep_numbers_as_tensors(module)
        assign_at_all_places(module)
        write_out_bags(module)
        make_gradients_dense(module)
        write_out_gradients(module)
    positions = {node.name: position for position, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    module = with_canonical_names(module)
    nodes = list(module.graph.nodes)
    sources = _sources(nodes, [node for node in nodes if node.op == "placeholder"])
    arguments = {
        port: positions[_argument(node).name] for node, port in sources.items() if port.kind is not PortKind.PARAMETER
    }
    outputs = _output_nodes(module)
    leaving = [node for node in outputs if is_marker(node, "exit")]
    results = [node.all_input_nodes[0] for node in leaving]
    named_loss = next((position for position, node in enumerate(leaving) if node.args[1] is True), None)
    kept = {position: node for position, node in enumerate(outputs) if not is_marker(node, "exit")}
    entered = [node for node in nodes if is_marker(node, "enter") and node.args[2] != PLAIN]
    batch_dims = {sources[node]: int(str(node.args[2])) for node in entered}
    microbatches = next((int(str(node.args[1])) for node in nodes if is_marker(node, "enter")), None)
    microbatch_size = example(entered[0]).shape[batch_dims[sources[entered[0]]]] if entered else None
    handle = leaving[0].args[2]
    assert isinstance(handle, int), f"{leaving[0]} names no model"
    buffers = {port: held[position] for port, position in arguments.items() if port.kind is PortKind.BUFFER}
    lines = {position: source_line(node) for position, node in kept.items()}
    return Capture(
        module,
        handle,
        sources,
        results,
        named_loss,
        arguments,
        batch_dims,
        microbatch_size,
        microbatches,
        buffers,
        lines,
        reads_grad_mode,
    )


def _see_collectives(module: fx.GraphModule) -> None:
    """Warn of those that are traced as on one process.

    Raises:
        CollectiveInForwardError: at the first one that is not.
    """
    for node in module.graph.nodes:
        if str(node.target).partition(".")[0] in _NAMESPACES_OF_COLLECTIVES:
            raise CollectiveInForwardError(str(node.target), source_line(node))
    if (called := collectives_called()) and is_first_rank():
        warnings.warn(CollectiveInForwardWarning(called), stacklevel=2)


def _reads_grad_mode(module: fx.GraphModule) -> bool:
    """Whether the traced code asked for what grad mode decides, or calls what may ask once it runs.

    What inputs and parameters require does not depend on the mode, nor does an op, which runs below autograd.
    """
    reads = reads_of_grad_mode()
    return any(node is None or not (is_marker(node, "param") or is_marker(node, "enter")) for node in reads) or any(
        not (_is_op(node) or _is_torchs_own(node)) for node in module.graph.nodes
    )


def _drop_unused_parameters(module: fx.GraphModule) -> None:
    """A forward that asks for the dtype of its first parameter lists others, which its first stage need not hold."""
    for node in [node for node in module.graph.nodes if is_marker(node, "param") and not node.users]:
        module.graph.erase_node(node)


def _sources(nodes: Sequence[fx.Node], placeholders: Sequence[fx.Node]) -> dict[fx.Node, Port]:
    sources = {}
    for node in nodes:
        if is_marker(node, "param"):
            sources[node] = Port(PortKind.PARAMETER, str(node.args[4]))
            # A parameter requires gradients under `no_grad`, too, but what the marker returns there does not.
            example(node).requires_grad_(example(_argument(node)).requires_grad)
        elif is_marker(node, "enter"):
            sources[node] = Port(PortKind.INPUT, str(node.args[3]))
    for node in placeholders:
        if not isinstance(node.meta.get("example_value"), torch.Tensor):
            raise UnsupportedGraphError(
                f"argument {node.target} of the forward became the symbolic number {node.meta.get('example_value')}: "
                "expected tensors and constants; pass it as a tensor or keep it fixed"
            )
        if any(user not in sources for user in node.users):
            if example(node).requires_grad:
                raise UnsupportedGraphError(
                    f"the forward reads a tensor that requires grad from {node.meta['grapharg'].source.name}: expected "
                    "parameters that modules had when the model was distributed, read as their attributes; add modules "
                    "before fxpar.distribute, read it from its module, pass it as an argument, or detach it"
                )
            sources[node] = Port(PortKind.BUFFER, node.name)
    return sources


def _argument(source: fx.Node) -> fx.Node:
    """The placeholder that feeds a source."""
    if source.op == "placeholder":
        return source
    argument = source.args[0]
    assert isinstance(argument, fx.Node)
    return argument


def _output_nodes(module: fx.GraphModule) -> Sequence[fx.Node]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    returned = output.args[0]
    assert isinstance(returned, tuple | list)
    return [node for node in returned if isinstance(node, fx.Node)]


def _graph_break(module: fx.GraphModule) -> FxparError:
    """Why the graph has no `exit`."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None:
        return GraphBreakError("reason unknown", "an unknown line")
    if reason.reason == _WHOLE:
        return UnsupportedGraphError(
            "no tensor was found in what the model's forward returns: expected tensors, alone or in tuples, lists, "
            "dicts and dataclasses; return them in these, or make the class that holds them known by "
            "torch.utils._pytree.register_pytree_node"
        )
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else "an unknown line"
    return error_of_graph_break(reason.reason, where)
