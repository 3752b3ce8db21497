"""Inductor's padding of matmuls, which it does as it traces forward and backward together. Seen in torch 2.11, 2.13."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten


def pad_matmuls(module: fx.GraphModule) -> None:
    """Pad matmuls on GPUs whose sizes keep them from fast kernels, where that is faster: Inductor times both.

    A vocabulary of 50,257 words makes a matmul several times slower than one of 50,264. To be called with the fake mode
    of the values, in ops that Inductor has lowerings for.

    Before: `mm = aten.mm(x, weight)`, (8192, 768) by (768, 50257)
    After:  `pad = aten.constant_pad_nd(weight, [0, 7, 0, 0])`, `mm = aten.mm(x, pad)`,
            `slice = aten.slice(mm, 1, 0, -7)`
    """
    if not any(isinstance(found, Tensor) and found.is_cuda for found in _values(module)):
        return  # Inductor's module takes long to import
    from torch._inductor.fx_passes import pad_mm

    matmuls: dict[Any, tuple[Callable[[Any], bool], Callable[..., Tensor], tuple[str, ...]]] = {
        aten.mm.default: (pad_mm.should_pad_mm, pad_mm.mm_replace, ("mat1", "mat2")),
        aten.bmm.default: (pad_mm.should_pad_bmm, pad_mm.bmm_replace, ("mat1", "mat2")),
        aten.addmm.default: (pad_mm.should_pad_addmm, pad_mm.addmm_replace, ("input", "mat1", "mat2")),
    }
    for node in list(module.graph.nodes):
        if node.target in matmuls:
            is_faster, padded, names = matmuls[node.target]
            if is_faster(SimpleNamespace(kwargs=dict(zip(names, node.args, strict=True)))):
                _replace(node, partial(padded, **node.kwargs))
    module.recompile()


def _values(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def _replace(node: fx.Node, function: Callable[..., Tensor]) -> None:
    """Compute a node by `function`. Its strides count as before: where they matter, Inductor restores them."""
    operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
    traced = make_fx(function)(*(operand.meta["val"] for operand in operands))
    known = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
    with node.graph.inserting_before(node):
        result = node.graph.graph_copy(traced.graph, known)
    assert isinstance(result, fx.Node), "a matmul has one result"
    result.meta = node.meta.copy()
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
