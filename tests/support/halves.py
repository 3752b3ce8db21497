"""Joint graphs of the stages of a model, and their backward run in two halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor, fx, nn

from fxpar.ir.capture import Capture
from fxpar.ir.stage import JointGraph, PortKind
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.partition import Partitioned, partition
from fxpar.passes.split_backward import SplitBackward, split_backward
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.support.captures import captured

Lower: TypeAlias = Callable[[fx.GraphModule], Callable[..., Sequence[Tensor]]]


def joints_of(
    model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], boundaries: Sequence[str]
) -> list[JointGraph]:
    """The joint graph of every stage of `model`, which changes as `distribute` changes it."""
    capture, _ = captured(model, example_inputs)
    return [trace_joint(stage, with_backward=True) for stage in split_stages(capture, boundaries)]


def decomposed(joint: JointGraph) -> JointGraph:
    """`joint` in the ops that shard better."""
    return replace(joint, module=decompose_for_sharding(joint.module))


def decomposed_stages(capture: Capture, boundaries: Sequence[str] = ()) -> list[JointGraph]:
    """The joint graphs of all stages of a capture, in the ops that shard better."""
    return [decomposed(trace_joint(stage, with_backward=True)) for stage in split_stages(capture, boundaries)]


def split(joint: JointGraph) -> tuple[Partitioned, SplitBackward]:
    """The three parts of a stage."""
    parts = partition(joint)
    return parts, split_backward(joint, parts)


def run_parts(
    joint: JointGraph, parts: Partitioned, halves: SplitBackward, values: Sequence[Tensor], lower: Lower
) -> list[Tensor]:
    """What the joint graph returns for `values`, by way of F, then I, then W."""
    inputs, tangents = values[: len(joint.inputs)], values[len(joint.inputs) :]
    made = lower(parts.forward)(*inputs)
    outputs, saved = made[: len(joint.outputs)], made[len(joint.outputs) :]
    by_inputs = lower(halves.inputs)(*(saved[i] for i in halves.inputs_saved), *tangents)
    num_edges = sum(port.kind is PortKind.EDGE for port in joint.gradients)
    of_edges, carried = iter(by_inputs[:num_edges]), by_inputs[num_edges:]
    assert len(carried) == halves.num_carried
    of_weights = iter(lower(halves.weights)(*(saved[i] for i in halves.weights_saved), *carried))
    return [*outputs, *(next(of_edges if port.kind is PortKind.EDGE else of_weights) for port in joint.gradients)]
