"""Which ops torch-tensorrt converts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensorMode, make_fx
from fxpar.graph.describe import describe, describe_call
from fxpar.ir.node_meta import value
from fxpar.ir.op_predicates import draws
from fxpar.ir.strides import unfilled_like

_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}
"""What TensorRT computes in, but for quantized values."""


class Converters:
    """The converters of torch-tensorrt, for these settings of its compiler."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from torch_tensorrt.dynamo import CompilationSettings
        from torch_tensorrt.dynamo.conversion import DYNAMO_CONVERTERS
        from torch_tensorrt.dynamo.lowering import get_decompositions

        DYNAMO_CONVERTERS.set_compilation_settings(CompilationSettings(**settings))  # which converters may ask for
        self._converters = DYNAMO_CONVERTERS
        self._decompositions = get_decompositions()
        self._known: dict[str, str | None] = {}

    def obstacle(self, node: fx.Node) -> str | None:
        """Why `node` cannot be part of an engine, by the name of its op; None if it can."""
        if node.target is operator.getitem:
            return _foreign_dtype(node, [node]) or self.obstacle(node.all_input_nodes[0])
        call = describe_call(node, {source: describe(value(source)) for source in node.all_input_nodes})
        if call not in self._known:
            self._known[call] = self._find_obstacle(node)
        return self._known[call]

    def _find_obstacle(self, node: fx.Node) -> str | None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return str(node.target)
        if (foreign := _foreign_dtype(node, [node, *node.all_input_nodes])) is not None:
            return foreign
        # The converter of a random op draws other numbers than PyTorch does.
        is_converted = not draws(node) and all(part in self._converters for part in self._parts(node))
        return None if is_converted else str(node.target)

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        """The ops that torch-tensorrt decomposes `node` into before it looks for converters; often `node` alone."""
        sources = node.all_input_nodes

        def call(*given: Tensor) -> Any:
            args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(sources, given, strict=True)).__getitem__)
            assert callable(node.target)
            return node.target(*args, **kwargs)

        with FakeTensorMode(), torch.no_grad():
            inputs = [unfilled_like(value(source)) for source in sources]
            trace = make_fx(call, decomposition_table=self._decompositions)
            return [part for part in trace(*inputs).graph.nodes if part.op == "call_function"]


def _foreign_dtype(node: fx.Node, values: Sequence[fx.Node]) -> str | None:
    """The name of the op with the first dtype of `values` that TensorRT lacks; None if it has all.

    Several results are several `values`, since those that nobody uses, such as the state of a generator, do no harm.
    """
    dtypes = [value(each).dtype for each in values if isinstance(value(each), Tensor)]
    return next((f"{node.target} of {dtype}" for dtype in dtypes if dtype not in _DTYPES), None)
