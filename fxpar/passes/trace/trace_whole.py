"""Trace a forward and its backward together into one ATen graph, by AOTAutograd."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import (
    FakeTensor,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    aot_export_joint_with_descriptors,
    rename_placeholder,
    with_effects,
)
from fxpar._torch.linalg_checks import AS_ASSERTIONS, linalg_checks_in_any_order
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.capture import example
from fxpar.ir.flex_attention import hold_flex_graphs
from fxpar.ir.held_graphs import hold_graphs
from fxpar.ir.node_meta import has_no_result, known_value, module_path, set_value
from fxpar.ir.stage import JointGraph, Port, PortKind, StageGraph


def trace_whole(stage: StageGraph, *, with_backward: bool) -> JointGraph:
    """The result of `trace_joint`, from one trace of all of `stage`.

    Raises: as `trace_joint`.
    """
    placeholders = stage.module.graph.find_nodes(op="placeholder")
    inputs = [_leaf(node, requires_grad=with_backward and example(node).requires_grad) for node in placeholders]
    with contextlib.ExitStack() as stack:
        if not with_backward:
            stack.enter_context(torch.no_grad())
        stack.enter_context(linalg_checks_in_any_order())
        decompositions = dict(AS_ASSERTIONS)
        joint = aot_export_joint_with_descriptors(stack, stage.module, tuple(inputs), decompositions=decompositions)
        module = joint.graph_module
    _check_effects(module, stage)
    hold_flex_graphs(module)
    hold_graphs(module)
    _remove_borders(module)
    _note_missing_results(module)
    return _with_ports(module, stage)


def _leaf(node: fx.Node, *, requires_grad: bool) -> Tensor:
    """A fake leaf tensor like the input at `node`, so that gradients are taken with respect to it."""
    value = example(node)
    assert isinstance(value, FakeTensor), "every example value is one"
    with value.fake_mode:
        leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return leaf.requires_grad_(requires_grad)


def _check_effects(module: fx.GraphModule, stage: StageGraph) -> None:
    for node in module.graph.nodes:
        if node.target is with_effects:
            raise UnsupportedGraphError(
                f"stage {stage.index} calls {node.args[1]} in module {module_path(node)!r}, which is registered as "
                "having effects in an order: no order holds over stages and microbatches; register it as an op that "
                "changes an argument instead, such as `Tensor(a!) buffer` in its schema"
            )


def _remove_borders(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is torch.ops.fxpar.border.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _note_missing_results(module: fx.GraphModule) -> None:
    """Set the value None on ops that are called only for their effect: the trace records no value for them."""
    for node in module.graph.nodes:
        if node.op == "call_function" and known_value(node) is None:
            assert has_no_result(node), f"{node.format_node()} was traced without a value"
            set_value(node, None)


def _with_ports(module: fx.GraphModule, stage: StageGraph) -> JointGraph:
    """Read AOTAutograd's descriptors back into ports, and put the outputs in the order that `JointGraph` promises."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    inputs, tangents = _read_inputs(placeholders, stage)
    names = [port.identifier for port in inputs] + [f"gradient_of_{port.identifier}" for port in tangents]
    for node, name in zip(placeholders, names, strict=True):
        rename_placeholder(node, name)
    returned = dict(_read_outputs(output, stage))
    outputs = [("value", port) for port in stage.outputs]
    outputs += [item for item in returned if item[0] == "value" and item[1].kind is PortKind.BUFFER]
    gradients = [item for item in returned if item[0] == "gradient" and returned[item] is not None]
    values = [returned[item] for item in (*outputs, *gradients)]
    with module.graph.inserting_before(output):
        module.graph.output(tuple(values))
    module.graph.erase_node(output)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return JointGraph(
        stage.index,
        module,
        tuple(inputs),
        tuple(port for _, port in outputs),
        tuple(tangents),
        tuple(port for _, port in gradients),
    )


def _read_inputs(placeholders: Sequence[fx.Node], stage: StageGraph) -> tuple[list[Port], list[Port]]:
    inputs, tangents = [], []
    for node in placeholders:
        match node.meta["desc"]:
            case PlainAOTInput(idx=position):
                inputs.append(stage.inputs[position])
            case TangentAOTInput(output=PlainAOTOutput(idx=position)):
                tangents.append(stage.outputs[position])
            case TangentAOTInput(output=InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=position))):
                raise _changed(stage, stage.inputs[position])
            case other:
                raise AssertionError(f"unexpected input {other} of the joint graph of stage {stage.index}")
    return inputs, tangents


def _read_outputs(output: fx.Node, stage: StageGraph) -> list[tuple[tuple[str, Port], Any]]:
    found: list[tuple[tuple[str, Port], Any]] = []
    (values,) = output.args
    assert isinstance(values, tuple | list)
    for value, descriptor in zip(values, output.meta["desc"], strict=True):
        match descriptor:
            case PlainAOTOutput(idx=position):
                found.append((("value", stage.outputs[position]), value))
            case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=position)):
                found.append((("value", _buffer(stage, position)), value))
            case GradAOTOutput(grad_of=PlainAOTInput(idx=position)):
                found.append((("gradient", stage.inputs[position]), value))
            case None:  # the gradient of an input that has none
                pass
            case other:
                raise AssertionError(f"unexpected output {other} of the joint graph of stage {stage.index}")
    return found


def _buffer(stage: StageGraph, position: int) -> Port:
    port = stage.inputs[position]
    if port.kind is not PortKind.BUFFER:
        raise _changed(stage, port)
    return port


def _changed(stage: StageGraph, port: Port) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"stage {stage.index} changes {port} in place: expected changes of buffers without gradients alone; "
        "write the operation out of place, open the stage elsewhere, or change parameters between steps"
    )
