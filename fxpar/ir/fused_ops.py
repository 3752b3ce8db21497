"""Fused ops, of a matmul and an adjacent collective: their schemas and reference implementations.

A gathered or scattered dim has the digits (outer, parts, rows): `outer` times, the pieces of all ranks of the group one
after another. Each rank's own piece has the digits (outer, rows).

All tensors are contiguous or transposed in their last two dims; "matrices" have two dims, or three, the first of which
counts independent matrices. Results are contiguous. The ops have no autograd formulas: they only occur in graphs that
are differentiated already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from fxpar._torch.distributed import c10d_functional

GatherForm: TypeAlias = Literal["rows", "columns", "sum_right", "sum_left", "matrices"]
"""How each matmul uses the gathered value G (its second last dim was gathered; in "matrices", its first):

"rows": G @ other. "columns": other @ G^T. "sum_right": other @ G, a sum over the gathered dim.
"sum_left": G^T @ other, likewise. "matrices": G @ other, matrix by matrix.
"""

ScatterForm: TypeAlias = Literal["rows", "columns", "matrices"]
"""Which dim of the product is scattered: its second last, its last, or the first of three."""

GATHER_FORMS: tuple[GatherForm, ...] = get_args(GatherForm)
SUMMING_FORMS: tuple[GatherForm, ...] = ("sum_right", "sum_left")
"""Forms that sum over the gathered dim: each rank adds up the pieces in the order in which it receives them."""
SCATTER_FORMS: tuple[ScatterForm, ...] = get_args(ScatterForm)

GATHERED_DIM: dict[str, int] = {form: 0 if form == "matrices" else -2 for form in GATHER_FORMS}
SCATTERED_DIM: dict[str, int] = {"rows": -2, "columns": -1, "matrices": 0}

_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda gathered, other: gathered @ other,
    "columns": lambda gathered, other: other @ gathered.mT,
    "sum_right": lambda gathered, other: other @ gathered,
    "sum_left": lambda gathered, other: gathered.mT @ other,
    "matrices": lambda gathered, other: gathered @ other,
}


@dataclass(slots=True)
class UnfusedCalls:
    """Calls of fused ops in this process that ran as a collective and matmuls, one after another."""

    count: int = 0


unfused_calls = UnfusedCalls()


def all_gather_matmul_reference(
    shard: Tensor,
    others: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    form: str,
    outer: int,
    parts: int,
    keeps_gathered: bool,
    group_name: str,
) -> list[Tensor]:
    """The products of the value gathered from all ranks' `shard` with each of `others`.

    Args:
        shard: matrices; this rank's piece of the gathered value G.
        others: matrices; what G is multiplied with.
        biases: for each product, what is added to it (of a shape that broadcasts to the product's), or None.
        form: a `GatherForm`.
        outer, parts: digits of the gathered dim; `parts` is the size of the group.
        keeps_gathered: whether G itself is wanted, too; it comes last.
        group_name: of the process group, by which functional collectives know it.
    """
    unfused_calls.count += 1
    started = c10d_functional.all_gather_into_tensor(shard.contiguous(), parts, group_name)
    pieces = c10d_functional.wait_tensor(started).view(parts, *shard.shape)
    return products_of_pieces(pieces, others, biases, form, outer, keeps_gathered)


def matmul_reduce_scatter_reference(
    left: Tensor, right: Tensor, bias: Tensor | None, form: str, outer: int, parts: int, group_name: str
) -> Tensor:
    """This rank's piece of the sum of all ranks' `left @ right + bias`.

    Args:
        left, right: matrices.
        bias: this rank's term, of a shape that broadcasts to the product's, or None.
        form: a `ScatterForm`.
        outer, parts: digits of the scattered dim; `parts` is the size of the group.
        group_name: of the process group, by which functional collectives know it.
    """
    unfused_calls.count += 1
    pieces = pieces_of_product(left, right, bias, form, outer, parts)
    started = c10d_functional.reduce_scatter_tensor(pieces.flatten(0, 1), "sum", parts, group_name)
    result: Tensor = c10d_functional.wait_tensor(started)
    return result


def matmul_all_reduce_reference(
    left: Tensor, right: Tensor, bias: Tensor | None, parts: int, group_name: str
) -> Tensor:
    """The sum of all ranks' `left @ right + bias`, whole on each of them.

    Args:
        left, right: matrices.
        bias: this rank's term, of a shape that broadcasts to the product's, or None.
        parts: the size of the group.
        group_name: of the process group, by which functional collectives know it.
    """
    unfused_calls.count += 1
    started = c10d_functional.all_reduce(product(left, right, bias), "sum", group_name)
    result: Tensor = c10d_functional.wait_tensor(started)
    return result


# Devices without kernels of their own run the references: a functional collective and plain matmuls.
all_gather_matmul = torch.library.custom_op("fxpar::all_gather_matmul", all_gather_matmul_reference, mutates_args=())
matmul_reduce_scatter = torch.library.custom_op(
    "fxpar::matmul_reduce_scatter", matmul_reduce_scatter_reference, mutates_args=()
)
matmul_all_reduce = torch.library.custom_op("fxpar::matmul_all_reduce", matmul_all_reduce_reference, mutates_args=())


# The references are their own fakes, since they call only ops that have fakes.
all_gather_matmul.register_fake(all_gather_matmul_reference)
matmul_reduce_scatter.register_fake(matmul_reduce_scatter_reference)
matmul_all_reduce.register_fake(matmul_all_reduce_reference)


def products_of_pieces(
    pieces: Tensor,
    others: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    form: str,
    outer: int,
    keeps_gathered: bool,
) -> list[Tensor]:
    """What `all_gather_matmul` returns, from the pieces (parts, *shard) of all ranks."""
    gathered = _joined(pieces, GATHERED_DIM[form], outer)
    products = [_PRODUCTS[form](gathered, other).contiguous() for other in others]
    found = [one if bias is None else one + bias for one, bias in zip(products, biases, strict=True)]
    return [*found, gathered] if keeps_gathered else found


def pieces_of_product(left: Tensor, right: Tensor, bias: Tensor | None, form: str, outer: int, parts: int) -> Tensor:
    """This rank's terms of the pieces of all ranks, (parts, *piece), that `matmul_reduce_scatter` sums."""
    return _split(product(left, right, bias), SCATTERED_DIM[form], outer, parts)


def product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """left @ right + bias."""
    found = left @ right
    return found if bias is None else found + bias


def _joined(pieces: Tensor, dim: int, outer: int) -> Tensor:
    """The pieces (parts, *piece) of all ranks, joined at the digits (outer, parts, rows) of `dim` of a piece."""
    dim %= pieces.dim() - 1
    digits: Tensor = pieces.unflatten(dim + 1, (outer, -1))
    return digits.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def _split(whole: Tensor, dim: int, outer: int, parts: int) -> Tensor:
    """The inverse of `_joined`: (parts, *piece), contiguous."""
    dim %= whole.dim()
    digits: Tensor = whole.unflatten(dim, (outer, parts, -1))
    return digits.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()
