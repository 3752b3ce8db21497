"""`matmul_all_reduce` on CPUs: a reduce-scatter of rows, whose sums all ranks then read."""

from __future__ import annotations

from torch import Tensor

from fxpar.ir import fused_ops
from fxpar.lowering.cpu.gathering import Gathering
from fxpar.lowering.cpu.multiply import product_shape
from fxpar.lowering.cpu.pieces import Pieces, as_box, scattered_ends
from fxpar.lowering.cpu.ring import near_first
from fxpar.lowering.cpu.scattering import Cut, Scattering
from fxpar.lowering.cpu.terms import Terms
from fxpar.lowering.cpu.workspace import workspace_of


@fused_ops.matmul_all_reduce.register_kernel("cpu")
def matmul_all_reduce(left: Tensor, right: Tensor, bias: Tensor | None, parts: int, group_name: str) -> Tensor:
    """See `fxpar.ir.fused_ops`. Terms are added up in a fixed order (`scattering`); half precision in float32.

    Raises:
        PeerLostError: a rank of the group has ended.
    """
    result = left.new_empty(product_shape(left, right))
    if result.numel() == 0:
        return result
    pieces = Pieces.ragged(parts, result.shape[-2])
    terms = Terms(left, right, bias, "rows", pieces)
    if parts == 1:
        whole = pieces.whole(0)
        terms.compute(0, whole, pieces.box(result, -2, 0, whole))
        return result
    workspace = workspace_of(group_name)
    largest = pieces.box(result, -2, parts - 1, pieces.whole(parts - 1))
    ends = scattered_ends(workspace.hosts, largest, -2)
    cut = Cut(
        [[(chunk, pieces.box(result, -2, part, chunk)) for chunk in pieces.chunks(part, ends)] for part in range(parts)]
    )
    scattered_bytes = Scattering.num_bytes(workspace.hosts, cut.room, result.dtype)
    call = workspace.begin(scattered_bytes + Gathering.num_bytes(workspace.hosts, cut.room))
    scattering = Scattering(call, 0, cut, terms)
    gathering = Gathering(call, scattered_bytes, cut.room)
    scattering.add_to_others()
    for number, (_, box) in enumerate(cut.pieces[workspace.rank]):
        scattering.total(number, as_box(gathering.own(number), box))
        gathering.publish(number)
    for part in [workspace.rank, *near_first(workspace.hosts, workspace.rank)]:
        for number, (_, box) in enumerate(cut.pieces[part]):
            box.copy_(as_box(gathering.wait(part, number), box))
    workspace.wire.finish()
    return result
