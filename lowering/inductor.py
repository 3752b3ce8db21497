"""The default lowering: Inductor's kernels, compiled once for all identical layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import (
    FakeTensorMode,
    ShapeEnv,
    TracingContext,
    inductor_compile,
    inductor_decompositions,
    make_fx,
    tracing,
)
from fxpar._torch.lazy_graph_module import code_of
from fxpar._torch.pad_matmuls import pad_matmuls
from fxpar.ir.flex_attention import FlexCall
from fxpar.ir.node_meta import is_backward, tensor
from fxpar.ir.strides import inverse, is_dense, stride_order, unfilled_like
from fxpar.lowering.cpu_collectives import replace_cpu_collectives
from fxpar.lowering.joint_compilation import joint_compilation
from fxpar.lowering.joint_generation import deferred_code, joint_generation
from fxpar.lowering.kept_code import Source, code_question
from fxpar.lowering.machine_lock import machine_lock, shared_folder
from fxpar.lowering.observed_collectives import with_observed_collectives
from fxpar.lowering.stitch import Compiled, stitch_regions


def lower_to_inductor(graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Compile every distinct region of the graph once per machine: ranks share the code that Inductor generates."""
    # In a backward, Inductor takes care of kernels that assume contiguous operands.
    backward = any(is_backward(node) for node in graph.graph.nodes)
    return lower_by_regions(graph, lambda region: compile_region(Source(region, backward)))


def lower_by_regions(
    graph: fx.GraphModule, compile_one: Callable[[fx.GraphModule], Compiled]
) -> Callable[..., Sequence[Tensor]]:
    """Compile every distinct region of the graph once by `compile_one`, which may leave it to `compile_region`."""
    with joint_compilation(), joint_generation():
        stitched = stitch_regions(graph, compile_one)
    return code_of(with_observed_collectives(replace_cpu_collectives(stitched)))


def compile_region(source: Source) -> Compiled:
    """Inductor's code for a region, or what will be, at the end of the joint generation."""
    question = code_question(source)
    if question is None:
        return _generate(source, caches=True)
    # Our own cache keeps the code, so Inductor's has no use for it: a key of that takes long to compute.
    return deferred_code(question, source, partial(_generate, caches=False))


def _generate(source: Source, *, caches: bool) -> Compiled:
    """Inductor's code for a region, which `caches` leaves to other ranks and later launches in Inductor's cache."""
    region = source.region
    # Inductor only caches graphs whose fake mode has a ShapeEnv.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        inputs = [unfilled_like(tensor(node)) for node in region.graph.nodes if node.op == "placeholder"]
        decomposed = _decompose(region, inputs)
        pad_matmuls(decomposed)
    with tracing(TracingContext(mode)), ExitStack() as one_at_a_time:
        if caches:
            one_at_a_time.enter_context(machine_lock(shared_folder(), f"{decomposed.code}{inputs}"))
        return inductor_compile(decomposed, inputs, backward=source.backward, caches=caches)


def _decompose(region: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The region in the ops that Inductor has lowerings or fallbacks for."""
    with torch.no_grad():
        trace = make_fx(_SameStrides(region).run, decomposition_table=inductor_decompositions())
        decomposed: fx.GraphModule = trace(*inputs)
    return decomposed


_PLAIN = str.maketrans({'"': "'", "\\": "/", "\n": " "})


class _SameStrides(fx.Interpreter):
    """Runs a graph and restores the recorded strides of values for which decompositions return other strides.

    Flex attention on CPUs is run by its definition: Inductor has no kernel for its backward. The messages of assertions
    are written into code as they are, so they have no characters that end a string there.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._assert_async.msg:
            asserted, message = args
            args = asserted, message.translate(_PLAIN)
        on_cpu = isinstance(target, FlexCall) and args[0].device.type == "cpu"
        return target.define(*args) if on_cpu else super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, Tensor) and _strides(found) != _strides(tensor(n)):
            assert is_dense(tensor(n)), f"{n} ({n.target}) has gaps or overlaps in memory that its decomposition lacks"
            order = stride_order(tensor(n))
            return found.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse(order))
        return found


def _strides(found: Tensor) -> list[int]:
    """The strides of all dims of more than one element."""
    return [stride for size, stride in zip(found.shape, found.stride(), strict=True) if size > 1]
