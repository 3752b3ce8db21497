"""Local graphs with collectives and matmuls, fused and not, run on the ranks of a fake mesh in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensorMode
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.graph.emit_redistribution import emit_step
from fxpar.graph.graph_writer import LocalGraph
from fxpar.graph.redistribute import RedistributeStep
from fxpar.ir.layout import REPLICATE, Layout, Partial, Shard
from fxpar.ir.node_meta import Placed, communication, fused, layout_of, set_placed, tensor
from fxpar.ir.overlap_options import FUSE_ALWAYS, Overlap
from fxpar.passes.fuse_collectives import Fused, fuse_collectives
from fxpar.passes.fusion.fusion_costs import estimate_fusions, max_over_ranks
from fxpar.world.mesh import Mesh
from tests.support.fake_mesh import as_rank
from tests.support.lockstep import run_ranks_in_lockstep

Write: TypeAlias = Callable[["Local"], Sequence[fx.Node]]
"""Writes a local graph, and says what it returns."""


class Local:
    """Writes the local graph of one rank of a mesh over x."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.double) -> None:
        self._mesh, self._dtype = mesh, dtype
        self._mode = FakeTensorMode()
        self._local = LocalGraph(self._mode)
        self._source = fx.Graph().placeholder("source")

    def given(self, *shape: int) -> fx.Node:
        """An input."""
        with self._local.on_behalf_of(self._source, backward=False), self._mode:
            name = f"given_{len(self._local.graph.nodes)}"
            return self._local.placeholder(name, shape, torch.empty(shape, dtype=self._dtype))

    def same(self, *shape: int) -> fx.Node:
        """An input that is the same on all ranks."""
        return self.alike(self.given(*shape))

    def alike(self, node: fx.Node) -> fx.Node:
        """`node`, whose value is the same on all ranks."""
        set_placed(node, Placed((), (Layout(tuple(tensor(node).shape)),)))
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an op."""
        with self._local.on_behalf_of(self._source, backward=False):
            return self._local.call(target, *args, **kwargs)

    def gathered(self, node: fx.Node, dim: int, outer: int = 1, size: int | None = None) -> fx.Node:
        """The whole of what `node` is this rank's shard of."""
        shape = list(tensor(node).shape)
        shape[dim] = size or shape[dim] * self._mesh.x
        shard = Layout(tuple(shape), (("x", Shard(dim, self._mesh.x, outer)),))
        return self._step(node, shard, shard.with_placement("x", REPLICATE))

    def scattered(self, node: fx.Node, dim: int, outer: int = 1) -> fx.Node:
        """This rank's shard of the sum of what all ranks have as `node`."""
        partial = Layout(tuple(tensor(node).shape), (("x", Partial()),))
        return self._step(node, partial, partial.with_placement("x", Shard(dim, self._mesh.x, outer)))

    def reduced(self, node: fx.Node, op: Any = "sum") -> fx.Node:
        """The sum, or another reduction, of what all ranks have as `node`."""
        partial = Layout(tuple(tensor(node).shape), (("x", Partial(op)),))
        return self._step(node, partial, partial.with_placement("x", REPLICATE))

    def _step(self, node: fx.Node, before: Layout, after: Layout) -> fx.Node:
        with self._local.on_behalf_of(self._source, backward=False):
            return emit_step(
                self._local, node, RedistributeStep("x", before, after), range(len(before.shape)), self._mesh
            )

    def finish(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """The graph."""
        with self._local.on_behalf_of(self._source, backward=False):
            self._local.given(self._local.graph.output(tuple(results)), None)
        return fx.GraphModule({}, self._local.graph)


def modules_of(write: Write, mesh: Mesh) -> list[fx.GraphModule]:
    """The local graph of every rank."""
    locals_ = [Local(as_rank(mesh, rank)) for rank in range(mesh.num_ranks)]
    return [local.finish(write(local)) for local in locals_]


def fuse_always(modules: Sequence[fx.GraphModule], mesh: Mesh) -> list[Fused]:
    """The graphs of all ranks, or of one, with all fused ops that there can be."""
    model = GraphModel(mesh, prices_of(mesh))
    costs = max_over_ranks({"all": estimate_fusions(module, model, Overlap())} for module in modules)
    return [fuse_collectives(module, costs["all"], FUSE_ALWAYS) for module in modules]


def random_inputs(module: fx.GraphModule, rank: int) -> list[Tensor]:
    """An input for each placeholder, laid out as that; those with a layout are the same on all ranks."""
    inputs = []
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        seed = index if layout_of(node) is not None else 100 * (rank + 1) + index
        generator, fake = torch.Generator().manual_seed(seed), tensor(node)
        inputs.append(torch.randn(fake.shape, generator=generator, dtype=fake.dtype))
    return inputs


@dataclass(frozen=True, slots=True)
class Compared:
    """The first rank's graph with fused ops, and what it and the one before give on every rank."""

    fused: Fused
    found: list[Any]
    expected: list[Any]


def compare(write: Write, mesh: Mesh) -> Compared:
    """Fuse the graph of every rank, and run it beside the one that it was."""
    before = modules_of(write, mesh)
    return compare_modules(before, [random_inputs(module, rank) for rank, module in enumerate(before)], mesh)


def compare_modules(before: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Tensor]], mesh: Mesh) -> Compared:
    """Fuse graphs of all ranks; all must come to the same verdicts, and fakes must lie in memory as real values do."""
    after = fuse_always(before, mesh)
    for one in after:
        one.module.graph.lint()
    kinds = {tuple((each.done.kind, each.fused, each.matmuls) for each in one.verdicts) for one in after}
    assert len(kinds) == 1, f"ranks come to different verdicts: {kinds}"
    return Compared(
        after[0],
        run_ranks_in_lockstep([one.module.graph for one in after], inputs, mesh),
        run_ranks_in_lockstep([module.graph for module in before], inputs, mesh),
    )


def check_same(compared: Compared, *, bitwise: bool = True) -> None:
    """Both give the same numbers, which lie alike in memory."""
    error = 0.0 if bitwise else 1e-9
    for found, expected in zip(compared.found, compared.expected, strict=True):
        torch.testing.assert_close(found, expected, rtol=error, atol=error)
        assert [value.stride() for value in found] == [value.stride() for value in expected]


def ops_of(module: fx.GraphModule) -> list[str]:
    """The names of all ops in order, but for views and the like."""
    free = ("view", "permute", "getitem", "t", "transpose")
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    names = [getattr(node.target, "_opname", node.target.__name__) for node in calls]
    return [name for name in names if name not in free]


def communications(module: fx.GraphModule) -> list[fx.Node]:
    """The collectives and fused ops of a graph."""
    return [node for node in module.graph.nodes if communication(node) is not None or fused(node) is not None]
