"""Linear layers and language models, laid out over x and y, and what the paper's equations say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.costs.equations import elements_sent, k, layer_elements, m, n, size
from fxpar.costs.prices import Prices
from fxpar.ir import node_meta
from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import is_backward
from fxpar.ir.stage import JointGraph
from fxpar.layouts.pins import Pins
from fxpar.passes.decompose.norm_policy import NormPolicy
from tests.layouts.laid_out import LaidOut, decomposed, lay_out, prices
from tests.support.small_models import GPT, hf_gpt2, hf_llama

Sent = tuple[str, str, float]
"""A collective: its kind, its axis, and the elements that each rank sends."""


def collectives_count(latency_us: float = 5.0) -> Prices:
    """Arithmetic is free, and a collective takes as long as some thousand elements, or more."""
    return prices(latency_us=latency_us, flops_per_us=1e12)


class Chain(nn.Module):
    """Linear layers with biases and activation functions between them."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.square().sum()


def by_equations(rows: int, width: int, columns: int, sizes: dict[str, int], *, transposed: bool) -> tuple[Sent, Sent]:
    """The all-reduce of a layer's result, and that of its input's gradient."""
    values = {m: rows, k: width, n: columns, **{size[axis]: sizes.get(axis, 1) for axis in size}}
    found = {
        axis: float(elements.subs(values))
        for (kind, axis), elements in layer_elements(transposed=transposed).items()
        if kind == "all_reduce"
    }
    forward, backward = ("x", "y") if transposed else ("y", "x")
    return ("all_reduce", forward, found[forward]), ("all_reduce", backward, found[backward])


def sent(laid: LaidOut, sizes: dict[str, int], *, backward: bool, at_least: float) -> list[Sent]:
    """The collectives of one direction, in order, in which ranks send so many elements or more."""
    found = []
    for c in laid.collectives:
        source = c.node.all_input_nodes[0]
        buffer = max(node_meta.tensor(source).numel(), node_meta.tensor(c.node).numel())
        elements = elements_sent(c.kind, buffer, sizes[c.axis])
        if is_backward(c.node) == backward and elements >= at_least:
            found.append((c.kind, c.axis, elements))
    return found


LAYERS, BATCH, LENGTH, WIDTH, VOCABULARY = 2, 2, 64, 128, 1024
ROWS = BATCH * LENGTH


@dataclass(frozen=True, slots=True)
class Subject:
    """A language model, and the products of each of its blocks, as (columns of weights, ...).

    Weights of `inner` products read one value together; each is followed by one of `outer`, of so many rows.
    """

    build: Callable[[], nn.Module]
    arguments: tuple[str, str]
    inner: tuple[tuple[int, ...], ...]
    outer: tuple[int, ...]


MODELS = {
    "gpt": Subject(
        lambda: GPT(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, layers=LAYERS),
        ("tokens", "targets"),
        ((3 * WIDTH,), (4 * WIDTH,)),
        (WIDTH, 4 * WIDTH),
    ),
    "hf_gpt2": Subject(
        lambda: hf_gpt2(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, layers=LAYERS),
        ("input_ids", "labels"),
        ((3 * WIDTH,), (4 * WIDTH,)),
        (WIDTH, 4 * WIDTH),
    ),
    "hf_llama": Subject(
        lambda: hf_llama(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, layers=LAYERS),
        ("input_ids", "labels"),
        ((WIDTH, WIDTH // 2, WIDTH // 2), (3 * WIDTH, 3 * WIDTH)),
        (WIDTH, 3 * WIDTH),
    ),
}


PLANE = {"y": 2, "x": 2}


def model_graph(name: str) -> JointGraph:
    subject = MODELS[name]
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    arguments = dict.fromkeys(subject.arguments, tokens)
    return decomposed(subject.build(), norm_policy=NormPolicy(4, shards_hidden=True), **arguments)


@cache
def laid_out_on_plane(name: str) -> LaidOut:
    return lay_out(model_graph(name), Pins(), collectives_count(), **PLANE)


def local(layout: Layout) -> tuple[int, ...]:
    return layout.local_shape({"y": 0, "x": 0})
