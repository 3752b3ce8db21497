"""Joint graphs traced on a CPU as they would be on a GPU, which need not be there."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar.annotate import set_value, value
from fxpar.passes.local_graph import fake_mode_of
from fxpar.stage import JointGraph

aten = torch.ops.aten


def on_gpu(joint: JointGraph, device: torch.device) -> JointGraph:
    """`joint` with all its values on `device`, and the attention that PyTorch runs there.

    Autograd cannot run on fake values of a GPU where PyTorch has no CUDA: so the graph is traced on the CPU first.
    """
    moved = _Moved(joint.module, device)
    for node in joint.module.graph.nodes:
        moved.add(node)
    moved.graph.lint()
    return replace(joint, module=fx.GraphModule(joint.module, moved.graph))


class _Moved:
    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        self.graph = fx.Graph()
        self._device, self._mode = device, fake_mode_of(module.graph)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._seeds: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def add(self, node: fx.Node) -> None:
        if node.op == "call_function":
            self._call(node)
            return
        copy = self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        if node.op == "placeholder":
            set_value(copy, pytree.tree_map_only(Tensor, self._there, value(node)))

    def _call(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copies.__getitem__)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: self._device, (args, kwargs))
        target = node.target
        if target is aten._scaled_dot_product_flash_attention_for_cpu.default:
            target, args, kwargs = _attention(*args, **kwargs)
        elif target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            target, args, kwargs = self._attention_backward(node, *args, **kwargs)
        copy = self._copies[node] = self._emit(node, target, args, kwargs)
        if target is aten._scaled_dot_product_efficient_attention.default:
            seed, offset = (self._emit(node, operator.getitem, (copy, place), {}) for place in (2, 3))
            self._seeds[node] = seed, offset

    def _attention_backward(
        self,
        node: fx.Node,
        grad: fx.Node,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        out: fx.Node,
        logsumexp: fx.Node,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: fx.Node | None = None,
        scale: float | None = None,
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """As the efficient kernel has it, with the seeds that its forward gave."""
        forward = node.args[5].args[0]  # type: ignore[union-attr]  # its sum of exponents is an item of what it gave
        seeds = self._seeds[forward]  # type: ignore[index]
        args = (grad, q, k, v, attn_mask, out, logsumexp, *seeds, dropout_p, [True, True, True, False], is_causal)
        return aten._scaled_dot_product_efficient_attention_backward.default, args, {"scale": scale}

    def _emit(self, origin: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = dict(origin.meta)
        given = fx.map_arg((args, kwargs), value)
        with self._mode, torch.no_grad():
            set_value(made, target(*given[0], **given[1]))
        return made

    def _there(self, fake: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=self._device)


def _attention(
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: fx.Node | None = None,
    scale: float | None = None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    args = (q, k, v, attn_mask, True, dropout_p, is_causal)
    return aten._scaled_dot_product_efficient_attention.default, args, {"scale": scale}
