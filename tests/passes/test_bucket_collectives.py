"""Small weights share a collective over z; what is large, or of another dtype, keeps its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpar.dump import format_graph
from fxpar.ir.stage import JointGraph
from fxpar.passes.bucket_collectives import bucket_collectives
from fxpar.passes.insert_collectives import collectives, insert_collectives
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.placements import as_told
from tests.support.stored_graphs import lay_out_stored


class Scaled(nn.Module):
    """Two vectors and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.matrix = nn.Parameter(torch.randn(8, 6))
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.matrix + self.shift


def local_graph(model: nn.Module, *args: Tensor, with_backward: bool = True) -> tuple[JointGraph, str]:
    """The graph of the first of two ranks along z, and the name of their group."""
    joint = joint_graph(model, *args, with_backward=with_backward)
    with fake_mesh(z=2) as mesh:
        lay_out_stored(joint, mesh, as_told({}))
        return insert_collectives(joint, mesh), mesh.group("z").group_name


def test_small_gathers_become_one_that_starts_with_the_first_and_is_cut_where_each_is_used() -> None:
    local, group = local_graph(Scaled(), torch.randn(3, 8), with_backward=False)
    bucket_collectives(local.module, small_bytes=100)
    assert (
        format_graph(local.module).replace(f"'{group}'", "GROUP")
        == """\
# forward: 2 all_gather over z, 248 bytes together
def forward(
    scale: f32[4],  # of [2@z*4]
    input_1: f32[3, 8],
    matrix: f32[4, 6],  # of [2@z*4, 6]
    shift: f32[3],  # of [2@z*3]
):

    # (no module)
    view: f32[4] = aten.view(scale, [4])
    view_1: f32[3] = aten.view(shift, [3])
    cat: f32[7] = aten.cat([view, view_1])
    all_gather_into_tensor_3: f32[14] = _c10d_functional.all_gather_into_tensor(cat, 2, GROUP)  # over z, 56 bytes
    wait_tensor_3: f32[14] = _c10d_functional.wait_tensor(all_gather_into_tensor_3)
    view_2: f32[2, 7] = aten.view(wait_tensor_3, [2, 7])
    slice_1: f32[2, 4] = aten.slice.Tensor(view_2, 1, 0, 4)
    clone: f32[2, 4] = aten.clone(slice_1, memory_format=torch.contiguous_format)
    view_3: f32[8] = aten.view(clone, [8])
    mul: f32[3, 8] = aten.mul.Tensor(input_1, view_3)
    all_gather_into_tensor_1: f32[8, 6] = _c10d_functional.all_gather_into_tensor(matrix, 2, GROUP)  # over z, 192 bytes
    wait_tensor_1: f32[8, 6] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
    mm: f32[3, 6] = aten.mm(mul, wait_tensor_1)
    slice_2: f32[2, 3] = aten.slice.Tensor(view_2, 1, 4, 7)
    clone_1: f32[2, 3] = aten.clone(slice_2, memory_format=torch.contiguous_format)
    view_4: f32[6] = aten.view(clone_1, [6])
    add: f32[3, 6] = aten.add.Tensor(mm, view_4)

    return (add,)
"""
    )


def test_small_reductions_become_one_behind_the_last_of_them() -> None:
    local, _ = local_graph(Scaled(), torch.randn(3, 8))
    before = [c.node.args[0] for c in collectives(local.module.graph) if c.kind == "reduce_scatter"]
    bucket_collectives(local.module, small_bytes=100)
    found = [c for c in collectives(local.module.graph) if c.kind == "reduce_scatter"]
    assert [c.num_bytes for c in found] == [8 * 6 * 4, (8 + 6) * 4]
    nodes = list(local.module.graph.nodes)
    assert all(nodes.index(term) < nodes.index(found[-1].node) for term in before)


def test_dtypes_do_not_mix_and_one_alone_stays_as_it_is() -> None:
    model = Scaled()
    model.shift = nn.Parameter(torch.randn(6, dtype=torch.float64))
    local, _ = local_graph(model, torch.randn(3, 8))
    before = format_graph(local.module)
    bucket_collectives(local.module, small_bytes=100)
    assert format_graph(local.module) == before


def test_nothing_over_other_axes_is_joined() -> None:
    joint = joint_graph(Scaled(), torch.randn(3, 8))
    with fake_mesh(x=2) as mesh:
        lay_out_stored(joint, mesh, as_told({}))
        local = insert_collectives(joint, mesh)
    before = format_graph(local.module)
    bucket_collectives(local.module)
    assert format_graph(local.module) == before
