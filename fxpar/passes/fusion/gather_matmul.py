"""Fuse an all-gather with the matmuls after it: find those that can be one op, and write that op."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

import fxpar.ir.fused_flops  # noqa: F401  registers the fused ops, too
from fxpar.graph.dim_map import Dims, SourceDigit, rearranges, sizes, whole
from fxpar.graph.graph_writer import GraphWriter, WriterInPlace
from fxpar.graph.matmuls import Matmul, matmul_at
from fxpar.graph.min_cut import closure, users
from fxpar.graph.view_ops import as_matrices, laid_out_like, rearranged_from_origin
from fxpar.graph.view_users import WAITED_ELSEWHERE, Unfit, ViewUsers, replace_view_users, users_of_views, wait_of
from fxpar.ir.fused_ops import GATHER_FORMS, SUMMING_FORMS, GatherForm
from fxpar.ir.layout import REPLICATE
from fxpar.ir.node_meta import Communication, communication, fused, layout_of, set_fused, take_place, tensor
from fxpar.passes.fusion.sink_gathers import SunkGather, find_sunk_gather, of_piece, write_on_pieces

_RANK = -1
"""The dim of digits that number the rank that a piece comes from; other dims are those of a piece."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A matmul of the gathered value, which has the `dims` in the form that the op takes; `other` is its other factor.

    If `is_transposed`, the op computes the transposed product.
    """

    matmul: Matmul
    form: GatherForm
    dims: Dims
    other: fx.Node
    is_transposed: bool

    @property
    def key(self) -> tuple[GatherForm, Dims]:
        """What all matmuls of one op have in common."""
        return self.form, self.dims


@dataclass(frozen=True, slots=True)
class GatherMatmul:
    """The all-gather `start` and `matmuls` that can be one op; `rest` are the other uses of the gathered value.

    The ops `before`, if any, run on each rank's piece first, and their result is gathered.
    """

    start: fx.Node
    wait: fx.Node
    uses: tuple[_Use, ...]
    rest: tuple[ViewUsers, ...]
    before: SunkGather | None

    @property
    def matmuls(self) -> tuple[fx.Node, ...]:
        """The nodes of the matmuls."""
        return tuple(use.matmul.node for use in self.uses)

    @property
    def fusion_key(self) -> str:
        """What ranks must have in common to run the op together, whatever the sizes of their pieces."""
        first = self.uses[0]
        order = [[digit.dim for digit in digits] for digits in first.dims]
        behind = [node.name for node in self.before.ops] if self.before else []
        return f"{behind} {first.form} {order} {[node.name for node in self.matmuls]}"

    @property
    def done(self) -> Communication:
        """What the op communicates."""
        done = communication(self.start)
        assert done is not None, f"{self.start} is no collective"
        return done if self.before is None else replace(done, num_bytes=tensor(self.before.last).nbytes)


def find_gather_matmul(start: fx.Node) -> GatherMatmul | Unfit:
    """The matmuls that the all-gather at `start` can be fused with, directly or after ops that can run on pieces."""
    wait = wait_of(start)
    if wait is None:
        return WAITED_ELSEWHERE
    parts = start.args[1]
    assert isinstance(parts, int), f"{start} gathers from no number of ranks"
    if parts == 1:
        return Unfit("there is one rank in its group")
    rank, piece = SourceDigit(_RANK, 1, parts), whole(tensor(start.all_input_nodes[0]).shape)
    gathered = ((rank, *piece[0]), *piece[1:])
    directly = _find_behind(start, wait, None, gathered)
    if isinstance(directly, Unfit):
        for before in find_sunk_gather(start, wait, gathered, rank):
            found = _find_behind(start, wait, before, _as_gathered(before.dims[before.last], rank))
            if isinstance(found, GatherMatmul):
                return found
    return directly


def _as_gathered(dims: Dims, rank: SourceDigit) -> Dims:
    """`dims` for the case that the value itself is gathered: in digits of its own pieces and that of the ranks."""
    own = whole(sizes(of_piece(dims, rank)))
    (dim,) = (dim for dim, digits in enumerate(dims) if rank in digits)
    place = dims[dim].index(rank)
    inner = math.prod(digit.size for digit in dims[dim][place + 1 :])
    outer = math.prod(digit.size for digit in dims[dim][:place])
    digits = (SourceDigit(dim, inner, outer), rank, SourceDigit(dim, 1, inner))
    return (*own[:dim], tuple(digit for digit in digits if digit.size > 1), *own[dim + 1 :])


def _find_behind(start: fx.Node, wait: fx.Node, before: SunkGather | None, dims: Dims) -> GatherMatmul | Unfit:
    """The matmuls of the gathered value, or of the result of the ops `before`; either has the `dims`."""
    parts = start.args[1]
    assert isinstance(parts, int), f"{start} gathers from no number of ranks"
    seen = users_of_views(before.last if before else wait, dims)
    behind = closure([wait], users)
    found = [use for each in seen for use in _uses(each, parts)]
    apart = [use for use in found if not _is_summed_alike(use, start)]
    possible = [use for use in apart if use.other not in behind and use.matmul.bias not in behind]
    if found and not apart:
        return Unfit(f"all ranks compute {found[0].matmul.node}, and must come to the same bits")
    if not possible:
        return Unfit(_why_not(seen, found, wait))
    first = min(possible, key=lambda use: (GATHER_FORMS.index(use.form), -_count(possible, use)))
    chosen: dict[fx.Node, _Use] = {}
    for use in possible:
        if use.key == first.key:
            chosen.setdefault(use.matmul.node, use)
    rest = (ViewUsers(each.node, each.dims, tuple(user for user in each.users if user not in chosen)) for each in seen)
    return GatherMatmul(start, wait, tuple(chosen.values()), tuple(each for each in rest if each.users), before)


def _is_summed_alike(use: _Use, start: fx.Node) -> bool:
    """Whether all ranks would compute one sum, each in another order, and get slightly different results."""
    done, layout = communication(start), layout_of(use.matmul.node)
    assert done is not None, f"{start} is no collective"
    return use.form in SUMMING_FORMS and layout is not None and layout.placement(done.axis) == REPLICATE


def _count(uses: Sequence[_Use], like: _Use) -> int:
    return sum(use.key == like.key for use in uses)


def _why_not(seen: Sequence[ViewUsers], found: Sequence[_Use], wait: fx.Node) -> str:
    if found:
        return f"{found[0].matmul.node} multiplies it with what is made of it"
    takers = list(dict.fromkeys(user for each in seen for user in each.users))
    ops = [user for user in takers if fused(user) is not None]
    if ops:
        return f"its matmul is part of {ops[0]}"
    multiplying = [user for user in takers if matmul_at(user) is not None]
    if multiplying:
        return f"its pieces lie apart in what {multiplying[0]} takes"
    if any(user.target is torch.ops.aten.slice.Tensor for user in takers):
        return "it is cut up or to size before anything takes it"
    cutting = [user for user in takers if rearranges(user)]
    if cutting:
        return f"{cutting[0]} takes its pieces apart"
    return f"no matmul takes it, but {', '.join(user.name for user in takers) or wait.name}"


def _uses(seen: ViewUsers, parts: int) -> Iterator[_Use]:
    """The uses of the gathered value by matmuls that can be part of one op."""
    for user in seen.users:
        matmul = matmul_at(user)
        if matmul is None or not any(SourceDigit(_RANK, 1, parts) in digits for digits in seen.dims):
            continue
        (place,) = (
            dim - len(seen.dims) for dim, digits in enumerate(seen.dims) if SourceDigit(_RANK, 1, parts) in digits
        )
        if matmul.left is seen.node:
            yield _use_as_left(matmul, seen.dims, place)
        if matmul.right is seen.node:
            yield from _use_as_right(matmul, seen.dims, place)


def _use_as_left(matmul: Matmul, dims: Dims, place: int) -> _Use:
    forms: dict[int, GatherForm] = {-3: "matrices", -2: "rows", -1: "sum_left"}
    if place == -1:
        dims = _transposed(dims)
    return _Use(matmul, forms[place], dims, matmul.right, is_transposed=False)


def _use_as_right(matmul: Matmul, dims: Dims, place: int) -> Iterator[_Use]:
    if place == -2:
        yield _Use(matmul, "sum_right", dims, matmul.left, is_transposed=False)
    elif place == -1:
        yield _Use(matmul, "columns", _transposed(dims), matmul.left, is_transposed=False)
    elif matmul.bias is None:  # (A B)^T = B^T A^T, whose first factor is the gathered value
        yield _Use(matmul, "matrices", _transposed(dims), matmul.left, is_transposed=True)


def _transposed(dims: Dims) -> Dims:
    return (*dims[:-2], dims[-1], dims[-2])


def write_gather_matmul(site: GatherMatmul) -> fx.Node:
    """Replace an all-gather and its matmuls by one op."""
    first, graph = site.uses[0], site.start.graph
    # Before all uses of the gathered value, so that ranks whose graphs differ in these have the same order.
    with graph.inserting_before(site.wait):
        write = WriterInPlace(graph, first.matmul.node)
        op = _write_op(write, site)
        set_fused(op, site.done)
        for position, use in enumerate(site.uses):
            _replace_product(write, use, _part(write, op, position))
        if site.rest:
            gathered = _part(write, op, len(site.uses))
            for seen in site.rest:
                replace_view_users(write, seen, gathered, first.dims)
    return op


def _write_op(write: GraphWriter, site: GatherMatmul) -> fx.Node:
    first, source = site.uses[0], site.start.all_input_nodes[0]
    _, parts, group = site.start.args
    (digits,) = (digits for digits in first.dims if any(digit.dim == _RANK for digit in digits))
    place = next(index for index, digit in enumerate(digits) if digit.dim == _RANK)
    if site.before is not None:
        source = write_on_pieces(write, site.before, site.wait, source)
    own = of_piece(first.dims, digits[place])
    others = [use.other for use in site.uses]
    if first.is_transposed:
        others = [write.call(torch.ops.aten.transpose.int, other, -2, -1) for other in others]
    return write.call(
        torch.ops.fxpar.all_gather_matmul.default,
        as_matrices(write, rearranged_from_origin(write, source, own)),
        [as_matrices(write, other) for other in others],
        [use.matmul.bias for use in site.uses],
        first.form,
        math.prod(digit.size for digit in digits[:place]),
        parts,
        bool(site.rest),
        group,
    )


def _part(write: GraphWriter, op: fx.Node, index: int) -> fx.Node:
    """One of the results of `op`."""
    return write.call(operator.getitem, op, index)


def _replace_product(write: GraphWriter, use: _Use, product: fx.Node) -> None:
    old = use.matmul.node
    if use.is_transposed:
        product = write.call(torch.ops.aten.transpose.int, product, -2, -1)
    product = laid_out_like(write, product, tensor(old))
    take_place(product, old)
    old.replace_all_uses_with(product)
