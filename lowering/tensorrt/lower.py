"""The lowering of forwards to TensorRT engines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from fxpar._torch.lazy_graph_module import code_of
from fxpar.dump import Dump
from fxpar.lowering.inductor import compile_region, lower_by_regions
from fxpar.lowering.kept_code import Source
from fxpar.lowering.stitch import Compiled, stitch
from fxpar.lowering.tensorrt.converters import Converters
from fxpar.lowering.tensorrt.engines import build_engine, engine_settings
from fxpar.lowering.tensorrt.partition import count_ops, reason_against, split_for_engines
from fxpar.lowering.tensorrt.verdicts import BUILT, Verdict, VerdictTable


class TensorRTLowering:
    """Builds engines from the ops of every distinct region that torch-tensorrt converts; Inductor compiles the others.

    An engine that cannot be built is a warning, and Inductor compiles its ops as well.

    Args:
        dump: gets the verdicts on all pieces of the graphs that were lowered.
    """

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._verdicts: list[Verdict] = []
        self._num_graphs = 0

    def __call__(self, graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
        """See `Lowering`; the graph is that of a forward."""
        compiler = _GraphCompiler(self._num_graphs, self._verdicts)
        code = lower_by_regions(graph, compiler.compile_region)
        self._num_graphs += 1
        self._dump.text("lower_to_tensorrt", VerdictTable(self._verdicts))
        return code


class _GraphCompiler:
    """Compiles the distinct regions of one graph, and appends a verdict for each of their pieces."""

    def __init__(self, graph: int, verdicts: list[Verdict]) -> None:
        self._graph, self._verdicts = graph, verdicts
        self._settings = engine_settings()
        self._obstacle = Converters(self._settings).obstacle
        self._region = -1

    def compile_region(self, region: fx.GraphModule) -> Compiled:
        """Code for a region: that of its pieces, one after another."""
        self._region += 1
        pieces = split_for_engines(region, self._obstacle)
        if len(pieces) == 1:
            return self._compile_piece(region)
        code = code_of(stitch(region, pieces, self._compile_piece))

        def run(box: list[Tensor]) -> Sequence[Any]:
            inputs = tuple(box)  # which live until the region ends; what pieces leave to each other is freed before
            box.clear()
            found: Sequence[Any] = code(*inputs)
            return found

        return run

    def _compile_piece(self, piece: fx.GraphModule) -> Compiled:
        nodes = [node for node in piece.graph.nodes if node.op == "call_function"]
        num_ops = count_ops(nodes)
        reason = reason_against(nodes, self._obstacle)
        engine: Compiled | None = None
        if reason is None:
            try:
                engine = build_engine(piece, self._settings)
            except Exception as error:  # of any class: TensorRT's, or that of a converter, of the export
                reason = f"the build failed: {error!r}"
                warnings.warn(f"Inductor runs {num_ops} ops in place of a TensorRT engine: {reason}", stacklevel=2)
        self._verdicts.append(Verdict(self._graph, self._region, num_ops, engine is not None, reason or BUILT))
        return engine or compile_region(Source(piece, backward=False))
