"""Where parameters are stored over z, and what is gathered and reduced in the graph for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from fxpar.dump import format_graph
from fxpar.ir.dtensor import is_expressible
from fxpar.ir.layout import REPLICATE, Layout, Shard
from fxpar.ir.node_meta import placed, tensor
from fxpar.ir.stage import JointGraph
from fxpar.passes.hoist_storage import hoist_storage
from fxpar.passes.insert_collectives import collectives, insert_collectives
from fxpar.passes.shard_storage import stored
from fxpar.rules.rule import Strategy
from fxpar.world.mesh import STAGE_AXES
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.placements import as_told
from tests.support.stored_graphs import lay_out_stored


class Mlp(nn.Module):
    """Two matrices, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8))
        self.down = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (functional.relu(x @ self.up) @ self.down).sum()


@pytest.fixture(scope="module")
def mlp() -> JointGraph:
    return joint_graph(Mlp(), torch.randn(6, 4))


@pytest.mark.parametrize(
    ("used", "parts", "expected"),
    [
        (Layout((8, 6)), 2, "[2@z*4, 6]"),
        (Layout((8, 6), (("x", Shard(0, 2)),)), 2, "[2@x*2@z*2, 6]"),
        (Layout((8, 6), (("y", Shard(0, 2)), ("x", Shard(1, 2)))), 2, "[2@y*2@z*2, 2@x*3]"),
        (Layout((36, 6), (("x", Shard(0, 2, 3)),)), 2, "[3*2@x*6, 2@z*3]"),  # fused q, k and v
        (Layout((36,), (("x", Shard(0, 2, 3)),)), 2, "[3*2@x*6]"),  # their bias
        (Layout((7, 6)), 2, "[7, 2@z*3]"),
        (Layout((7, 5)), 2, "[2@z*4, 5]"),
        (Layout((3, 50)), 4, "[3, 4@z*13]"),
        (Layout((3,)), 4, "[3]"),
        (Layout(()), 2, "[]"),
        (Layout((1, 6)), 2, "[1, 2@z*3]"),
    ],
)
def test_storage_is_in_the_first_dim_that_is_gathered_without_copies(used: Layout, parts: int, expected: str) -> None:
    assert str(stored(used, parts)) == expected


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Tensors of up to three dims, as y and x may hold them."""
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=0, max_size=3)))
    layout = Layout(shape)
    for axis in ("y", "x"):
        parts = draw(st.integers(1, 3))
        shards = [Shard(d, parts, outer) for d, size in enumerate(shape) for outer in range(1, size + 1)]
        fitting = [shard for shard in shards if shard.fits(shape[shard.dim]) and layout.accepts(shard)]
        if parts > 1 and fitting and draw(st.booleans()):
            layout = layout.with_placement(axis, draw(st.sampled_from(fitting)))
    return layout


@given(layouts(), st.integers(2, 4))
def test_storage_holds_every_element_once_along_z_and_stays_as_it_was_along_other_axes(
    used: Layout, parts: int
) -> None:
    layout = stored(used, parts)
    assert layout.with_placement("z", REPLICATE) == used
    shard = layout.placement("z")
    sizes = [
        math.prod(layout.local_shape({"y": 0, "x": 0, "z": z})) if isinstance(shard, Shard) else 0 for z in range(parts)
    ]
    whole = math.prod(used.local_shape({"y": 0, "x": 0}))
    if isinstance(shard, Shard):
        assert sum(sizes) == whole
        assert max(sizes) <= (whole / parts if shard.fits(used.shape[shard.dim]) else 2 * whole / parts)
    if is_expressible(used, STAGE_AXES):
        assert is_expressible(layout, STAGE_AXES), "optimizers and checkpoints go by DTensors"
    if not used.axes and any(size >= parts for size in used.shape):
        assert isinstance(shard, Shard)


def test_weights_are_gathered_before_their_first_use_and_gradients_scattered_as_they_come(mlp: JointGraph) -> None:
    with fake_mesh(z=2) as mesh:
        border = lay_out_stored(mlp, mesh, as_told({}))
        local = insert_collectives(mlp, mesh)
        group = mesh.group("z").group_name
    assert {port.name: str(layout) for port, layout in border.gradients.items()} == {
        "up": "[2@z*2, 8]",
        "down": "[2@z*4, 4]",
    }
    assert [str(layout) for layout in placed(mlp.module.graph.output_node()).inputs[1:]] == ["[2@z*2, 8]", "[2@z*4, 4]"]
    text = format_graph(local.module).replace(f"'{group}'", "GROUP")
    assert "# forward: 2 all_gather over z, 256 bytes together\n" in text
    assert "# backward: 2 reduce_scatter over z, 256 bytes together\n" in text
    assert (
        """\
    all_gather_into_tensor: f32[4, 8] = _c10d_functional.all_gather_into_tensor(up, 2, GROUP)  # over z, 128 bytes
    wait_tensor: f32[4, 8] = _c10d_functional.wait_tensor(all_gather_into_tensor)
    mm: f32[6, 8] = aten.mm(input_1, wait_tensor)
"""
        in text
    ), text


@pytest.mark.parametrize("sizes", [{"z": 2}, {"z": 4, "y": 2, "x": 2}, {"z": 2, "x": 4}], ids=str)
def test_collectives_over_z_move_what_the_equations_say(sizes: dict[str, int]) -> None:
    """Eqs. 4 and 5 of AxoNN (Singh et al., section on the performance model), in elements that a rank sends."""
    gz, gy, gx = (sizes.get(axis, 1) for axis in ("z", "y", "x"))
    k, n = 16, 32
    joint = joint_graph(nn.Linear(k, n, bias=False), torch.randn(8, k))
    dims = iter([dim for dim, parts in ((1, gy), (0, gx)) if parts > 1])  # rows over y, columns over x

    def shard_the_weight(node: fx.Node, strategies: Sequence[Strategy]) -> Strategy:
        if node.op != "placeholder" or tuple(tensor(node).shape) != (n, k):
            return strategies[0]
        dim = next(dims)
        return next(s for s in strategies if isinstance(p := s.outputs[0], Shard) and (p.dim, p.outer) == (dim, 1))

    with fake_mesh(**sizes) as mesh:
        lay_out_stored(joint, mesh, shard_the_weight)
        found = [each for each in collectives(insert_collectives(joint, mesh).module.graph) if each.axis == "z"]
    sent = {each.kind: each.num_bytes / 4 * (gz - 1) / gz for each in found}
    expected = (gz - 1) * k * n / (gx * gy * gz)
    assert sent == {"all_gather": expected, "reduce_scatter": expected}


def test_weights_gathered_once_are_waited_for_where_they_are_used(mlp: JointGraph) -> None:
    with fake_mesh(z=2) as mesh:
        lay_out_stored(mlp, mesh, as_told({}))
        hoisted = hoist_storage(insert_collectives(mlp, mesh), gathers=True, reductions=True)
        group = mesh.group("z").group_name
    assert hoisted.gathers is not None and hoisted.reductions is not None
    assert (
        format_graph(hoisted.gathers.module).replace(f"'{group}'", "GROUP")
        == """\
# forward: 2 all_gather over z, 256 bytes together
def forward(
    up: f32[2, 8],  # of [2@z*2, 8]
    down: f32[4, 4],  # of [2@z*4, 4]
):

    # (no module)
    all_gather_into_tensor: f32[4, 8] = _c10d_functional.all_gather_into_tensor(up, 2, GROUP)  # over z, 128 bytes
    all_gather_into_tensor_1: f32[8, 4] = _c10d_functional.all_gather_into_tensor(down, 2, GROUP)  # over z, 128 bytes

    return (all_gather_into_tensor, all_gather_into_tensor_1)
"""
    )
    assert not collectives(hoisted.body.module.graph)
    text = format_graph(hoisted.body.module)
    assert "    wait_tensor: f32[4, 8] = _c10d_functional.wait_tensor(up)\n    mm: f32[6, 8] = aten.mm(" in text, text
    assert [each.kind for each in collectives(hoisted.reductions.start.graph)] == ["reduce_scatter"]  # both
    assert not collectives(hoisted.reductions.finish.graph)
