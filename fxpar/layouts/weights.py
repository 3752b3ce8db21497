"""Weights of matrix products, which every rank uses as the shards that it stores.

A rank along x or y multiplies by its shard of a weight: the weight is never gathered over these axes. Where both have
several ranks, one shards a weight's rows and the other its columns, as in Algorithm 1 of Singh et al. (AxoNN): the
result of a layer then has the layout that the next one takes, with the axes swapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import fx

from fxpar.costs.dataflow import Border, Operation, Value
from fxpar.costs.op_cost import num_flops
from fxpar.ir.layout import Layout, Shard
from fxpar.rules.rule import Strategy

aten = torch.ops.aten


class Wanted(IntEnum):
    """How a weight should be sharded along an axis, in order of preference.

    OWN_DIM: in a dim that no other axis shards. SHARDED: in any dim.
    """

    OWN_DIM = 0
    SHARDED = 1
    ANY = 2

    def among(self, strategies: Sequence[Strategy], solved: Layout) -> Sequence[Strategy]:
        """The `strategies` of a weight that satisfy this; if its sizes allow none, those for the next preference.

        `solved` is the layout of the weight along the other axes.
        """
        held = {placement.dim for _, placement in solved.axes if isinstance(placement, Shard)}
        shards = [(s, s.outputs[0].dim) for s in strategies if isinstance(s.outputs[0], Shard)]
        sharded = [strategy for strategy, _ in shards]
        own = [strategy for strategy, dim in shards if dim not in held]
        match self:
            case Wanted.OWN_DIM:
                return own or sharded or strategies
            case Wanted.SHARDED:
                return sharded or strategies
        return strategies


def is_product(operation: Operation) -> bool:
    """Whether an op is a matrix product, or an embedding lookup, which is a product with one-hot rows."""
    return num_flops(operation) > 0 or operation.node.target is aten.embedding.default


def weights_of_products(program: Sequence[Operation]) -> list[fx.Node]:
    """The parameters of at least two dims that matrix products, convolutions and lookups take, also after casts."""
    made_of = _parameters_in(program)
    found: dict[fx.Node, None] = {}
    for operation in program:
        if is_product(operation):
            for value in operation.operands:
                found.update((node, None) for node in made_of.get(value, ()) if Value(node).tensor.dim() > 1)
    return list(found)


def _parameters_in(program: Sequence[Operation]) -> Mapping[Value, tuple[fx.Node, ...]]:
    """The parameters of which each value is made, for values that are made of nothing else."""
    made_of: dict[Value, tuple[fx.Node, ...]] = {}
    for operation in program:
        nodes: tuple[fx.Node, ...] = ()
        if operation.is_parameter(Border.INPUT):
            nodes = (operation.node,)
        elif all(value in made_of for value in operation.operands):
            nodes = tuple(dict.fromkeys(node for value in operation.operands for node in made_of[value]))
        if nodes:
            made_of.update((result, nodes) for result in operation.results if result is not None)
    return made_of
