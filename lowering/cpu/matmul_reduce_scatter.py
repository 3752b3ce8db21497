"""`matmul_reduce_scatter` on CPUs: every rank computes a term for each owner in turn, directly in its memory."""

from __future__ import annotations

from torch import Tensor

from fxpar.ir import fused_ops
from fxpar.lowering.cpu.multiply import product_shape
from fxpar.lowering.cpu.pieces import Pieces, scattered_ends
from fxpar.lowering.cpu.scattering import Cut, Scattering
from fxpar.lowering.cpu.terms import Terms
from fxpar.lowering.cpu.workspace import workspace_of


@fused_ops.matmul_reduce_scatter.register_kernel("cpu")
def matmul_reduce_scatter(
    left: Tensor, right: Tensor, bias: Tensor | None, form: str, outer: int, parts: int, group_name: str
) -> Tensor:
    """See `fxpar.ir.fused_ops`. Terms are added up in a fixed order (`scattering`); half precision in float32.

    Raises:
        PeerLostError: a rank of the group has ended.
    """
    shape = product_shape(left, right)
    dim = fused_ops.SCATTERED_DIM[form]
    shape[dim] //= parts
    terms = Terms(left, right, bias, form, Pieces.equal(outer, parts, shape[dim]))
    result = left.new_empty(shape)
    if result.numel() == 0:
        return result
    if parts == 1:
        whole = terms.pieces.whole(0)
        terms.compute(0, whole, terms.pieces.box(result, dim, 0, whole))
        return result
    workspace = workspace_of(group_name)
    own = terms.pieces.alone(0)
    chunks = own.chunks(0, scattered_ends(workspace.hosts, result, dim))
    cut = Cut([[(chunk, own.box(result, dim, 0, chunk)) for chunk in chunks]] * parts)
    call = workspace.begin(Scattering.num_bytes(workspace.hosts, cut.room, result.dtype))
    scattering = Scattering(call, 0, cut, terms)
    scattering.add_to_others()
    for number, (_, box) in enumerate(cut.pieces[workspace.rank]):
        scattering.total(number, box)
    workspace.wire.finish()
    return result
