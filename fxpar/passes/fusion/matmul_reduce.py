"""Fuse a matmul with the reduce-scatter or all-reduce of its result: find out if they can be one op, and write it."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

import fxpar.ir.fused_flops  # noqa: F401  registers the fused ops, too
from fxpar._torch.distributed import process_group_named
from fxpar.graph.dim_map import Dims, SourceDigit, joined, rearranges, regrouped, through, whole
from fxpar.graph.graph_writer import GraphWriter, WriterInPlace
from fxpar.graph.matmuls import Matmul, matmul_at
from fxpar.graph.view_ops import as_matrices, rearrange
from fxpar.graph.view_users import WAITED_ELSEWHERE, Unfit, ViewUsers, replace_view_users, users_of_views, wait_of
from fxpar.ir.fused_ops import ScatterForm
from fxpar.ir.node_meta import Communication, communication, fused, set_fused, tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Scatter:
    """Which dim of the product is scattered, and how many separate ranges of it a rank's piece has."""

    form: ScatterForm
    outer: int


@dataclass(frozen=True, slots=True)
class MatmulReduce:
    """A matmul and the collective `start` that sums its products, which can be one op.

    `bias` is added to the product before the sum; it has the `bias_dims`, in digits of the product. The op's result has
    the `dims`, in such digits as well, and the users `seen`. Without a `scatter` the op is an all-reduce.
    """

    start: fx.Node
    matmul: Matmul
    scatter: _Scatter | None
    bias: fx.Node | None
    bias_dims: Dims
    dims: Dims
    seen: tuple[ViewUsers, ...]

    @property
    def matmuls(self) -> tuple[fx.Node, ...]:
        """The node of the matmul."""
        return (self.matmul.node,)

    @property
    def fusion_key(self) -> str:
        """What ranks must have in common to run the op together, whatever the sizes of their pieces."""
        return f"{self.scatter and self.scatter.form} {self.matmul.node.name}"

    @property
    def done(self) -> Communication:
        """What the op communicates."""
        done = communication(self.start)
        assert done is not None, f"{self.start} is no collective"
        return done


@dataclass(frozen=True, slots=True)
class _Product:
    """A product that a collective reduces; the collective's operand has the `dims`, in digits of the product."""

    matmul: Matmul
    dims: Dims
    bias: fx.Node | None
    bias_dims: Dims


def find_matmul_reduce(start: fx.Node) -> MatmulReduce | Unfit:
    """The matmul that the all-reduce or reduce-scatter at `start` can be fused with."""
    wait = wait_of(start)
    if wait is None:
        return WAITED_ELSEWHERE
    if start.args[1] != "sum":
        return Unfit(f"it reduces by {start.args[1]}")
    product = _find_product(start)
    if isinstance(product, Unfit):
        return product
    shape = tensor(product.matmul.node).shape
    if len(start.args) == 3:
        seen = users_of_views(wait, product.dims)
        dims = whole(shape)
        return MatmulReduce(start, product.matmul, None, product.bias, product.bias_dims, dims, tuple(seen))
    parts = start.args[2]
    assert isinstance(parts, int), f"{start} scatters to no number of ranks"
    if parts == 1:
        return Unfit("there is one rank in its group")
    stacked = regrouped(product.dims, [parts, *tensor(wait).shape])
    if stacked is None or len(stacked[0]) != 1:
        return Unfit(f"its pieces lie apart in what {product.matmul.node} returns")
    (rank,) = stacked[0]
    scatter = _Scatter(_FORMS[rank.dim - len(shape)], shape[rank.dim] // (rank.step * parts))
    seen = users_of_views(wait, stacked[1:])
    dims = _without(whole(shape), rank)
    return MatmulReduce(start, product.matmul, scatter, product.bias, product.bias_dims, dims, tuple(seen))


_FORMS: dict[int, ScatterForm] = {-3: "matrices", -2: "rows", -1: "columns"}


def _without(dims: Dims, rank: SourceDigit) -> Dims:
    """`dims`, each one digit or none, without the digit `rank` in one of them."""
    outer = SourceDigit(
        rank.dim, rank.step * rank.size, math.prod(d.size for d in dims[rank.dim]) // (rank.step * rank.size)
    )
    inner = SourceDigit(rank.dim, 1, rank.step)
    piece = joined(digit for digit in (outer, inner) if digit.size > 1)
    return tuple(piece if dim == rank.dim else digits for dim, digits in enumerate(dims))


def _find_product(start: fx.Node) -> _Product | Unfit:
    """The matmul whose product, perhaps plus another value, is what `start` reduces, and is used nowhere else."""
    top, path = _followed_back(start.all_input_nodes[0])
    if len(top.users) > 1 or any(len(node.users) > 1 for node in path):
        return Unfit(f"what {top} returns is used as it is, too")
    matmul = matmul_at(top)
    if matmul is not None:
        dims = whole(tensor(top).shape)
        return _product(matmul, dims, path, None, dims)
    op = top.args[0] if top.target is operator.getitem else top
    if isinstance(op, fx.Node) and fused(op) is not None:
        return Unfit(f"its matmul is part of {op}")
    if top.target is aten.add.Tensor and top.kwargs.get("alpha", 1) == 1:
        return _product_in_sum(top, path)
    if top.target is aten._to_copy.default:
        return Unfit(f"{top} makes {tensor(top).dtype} of the terms before they are summed")
    return Unfit(f"no matmul produces it, but {top}")


def _product_in_sum(total: fx.Node, path: list[fx.Node]) -> _Product | Unfit:
    """The product in a sum of two terms, with the other term as its bias; the second one if both are products."""
    terms = total.all_input_nodes
    if len(terms) != 2 or any(tensor(term).shape != tensor(total).shape for term in terms):
        return Unfit(f"no matmul produces it, but {total}")
    for term, other in ((terms[1], terms[0]), (terms[0], terms[1])):
        top, way = _followed_back(term)
        matmul = matmul_at(top)
        is_alone = all(len(node.users) == 1 for node in (top, *way))
        if matmul is None or matmul.bias is not None or not is_alone or tensor(term).dtype != tensor(other).dtype:
            continue
        dims = _all_through(way, whole(tensor(top).shape))
        if dims is not None:
            return _product(matmul, dims, path, other, dims)
    return Unfit(f"no matmul produces a term of its own to {total}")


def _product(
    matmul: Matmul, at_top: Dims, path: list[fx.Node], bias: fx.Node | None, bias_dims: Dims
) -> _Product | Unfit:
    dims = _all_through(path, at_top)
    if dims is None:
        return Unfit(f"what {matmul.node} returns is cut up before it is summed")
    return _Product(matmul, dims, bias, bias_dims)


def _followed_back(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node that `node` is rearranged from, and the rearranging ops from there to `node`, in order."""
    path: list[fx.Node] = []
    while rearranges(node):
        path.insert(0, node)
        (node,) = node.all_input_nodes
    return node, path


def _all_through(path: list[fx.Node], dims: Dims) -> Dims | None:
    found: Dims | None = dims
    for node in path:
        found = None if found is None else through(node, found)
    return found


def write_matmul_reduce(site: MatmulReduce) -> fx.Node:
    """Replace a matmul and a collective by one op."""
    graph = site.start.graph
    with graph.inserting_before(site.start):
        write = WriterInPlace(graph, site.matmul.node)
        op = _write_op(write, site)
        set_fused(op, site.done)
        for seen in site.seen:
            replace_view_users(write, seen, op, site.dims)
    return op


def _write_op(write: GraphWriter, site: MatmulReduce) -> fx.Node:
    matmul, group = site.matmul, site.start.args[-1]
    operands = as_matrices(write, matmul.left), as_matrices(write, matmul.right)
    bias = matmul.bias
    if site.bias is not None:
        bias = rearrange(write, site.bias, site.bias_dims, whole(tensor(matmul.node).shape))
    if site.scatter is None:
        num_ranks = dist.get_world_size(process_group_named(str(group)))
        return write.call(torch.ops.fxpar.matmul_all_reduce.default, *operands, bias, num_ranks, group)
    form, outer, parts = site.scatter.form, site.scatter.outer, site.start.args[2]
    return write.call(torch.ops.fxpar.matmul_reduce_scatter.default, *operands, bias, form, outer, parts, group)
