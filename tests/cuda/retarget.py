"""Joint graphs traced on a CPU as they would be on a GPU, which need not be there."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.node_meta import set_value, value
from fxpar.ir.stage import JointGraph
from tests.cuda.attention import BACKWARD_ON_CPU, ON_CPU, Attention, Called, CalledBackward

aten = torch.ops.aten


def on_gpu(joint: JointGraph, device: torch.device, attention: Attention) -> JointGraph:
    """`joint` with all its values on `device`, and `attention` in the place of the CPU's.

    Autograd cannot run on fake values of a GPU where PyTorch has no CUDA: so the graph is traced on the CPU first.
    """
    moved = _Moved(joint.module, device, attention)
    for node in joint.module.graph.nodes:
        moved.add(node)
    moved.graph.lint()
    return replace(joint, module=fx.GraphModule(joint.module, moved.graph))


class _Moved:
    def __init__(self, module: fx.GraphModule, device: torch.device, attention: Attention) -> None:
        self.graph = fx.Graph()
        self._device, self._mode = device, fake_mode_of(module.graph)
        self._attention = attention
        self._copies: dict[fx.Node, fx.Node] = {}
        self._seeds: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def add(self, node: fx.Node) -> None:
        if node.op == "call_function":
            self._call(node)
            return
        copy = self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        if node.op == "placeholder":
            set_value(copy, pytree.tree_map_only(Tensor, self._there, value(node)))

    def _call(self, node: fx.Node) -> None:
        given: Any = fx.map_arg((node.args, node.kwargs), self._copies.__getitem__)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: self._device, given)
        target, kwargs = node.target, dict(kwargs)
        if target is ON_CPU:
            mask = kwargs.pop("attn_mask", None)
            target, args = self._attention.forward, self._attention.forward_args(Called(*args, mask=mask))
        elif target is BACKWARD_ON_CPU:
            seeds = self._seeds[args[5].args[0]]  # its sums of exponents are an item of what the forward gave
            call = CalledBackward(*args, mask=kwargs.pop("attn_mask", None), seeds=seeds)
            target, args = self._attention.backward, self._attention.backward_args(call)
        copy = self._copies[node] = self._emit(node, target, args, kwargs)
        if target is self._attention.forward:
            places = self._attention.seeds
            self._seeds[copy] = tuple(self._emit(node, operator.getitem, (copy, place), {}) for place in places)

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
