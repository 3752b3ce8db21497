"""Two-dimensional tensor parallelism, found by cost: the collectives of layers are those of the paper's equations.

Singh et al.: a layer of m x k by k x n reduces its result along y (Eq. 6) and its input's gradient along x (Eq. 7);
in every second layer x and y change places.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxpar.bench.models import LLAMA_HINTS
from fxpar.costs.equations import elements_sent, k, layer_elements, m, n, size
from fxpar.costs.prices import Prices
from fxpar.ir import node_meta
from fxpar.ir.hints import Spec
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.node_meta import is_backward
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.layouts.pins import Pins
from fxpar.passes.decompose.norm_policy import NormPolicy
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.memory.activation_memory import activation_memory
from fxpar.passes.partition import partition
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.layouts.laid_out import LaidOut, decomposed, lay_out, pins_of, prices
from tests.support.captures import captured
from tests.support.fake_mesh import fake_mesh
from tests.support.halves import decomposed as in_parts
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs
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


@pytest.mark.parametrize(
    ("widths", "sizes"),
    [
        ((48, 96, 48, 96, 48), {"y": 2, "x": 2}),
        ((48, 96, 48, 96, 48), {"y": 3, "x": 2}),
        ((96, 48, 72, 24, 120, 48), {"y": 2, "x": 4}),
    ],
    ids=str,
)
def test_layers_of_a_chain_reduce_along_x_and_y_in_turn(widths: tuple[int, ...], sizes: dict[str, int]) -> None:
    """One all-reduce per layer and direction, of the paper's size, and nothing between layers."""
    rows = 512
    with torch.device("meta"):
        joint = decomposed(Chain(widths), torch.randn(rows, widths[0]))
    laid = lay_out(joint, Pins(), collectives_count(), **sizes)
    first, *rest = sent(laid, sizes, backward=False, at_least=rows)
    transposed = first[1] == "x"
    layers = [
        by_equations(rows, a, b, sizes, transposed=transposed != (number % 2 == 1))
        for number, (a, b) in enumerate(pairwise(widths))
    ]
    assert [first, *rest] == [forward for forward, _ in layers]
    gradients = [backward for _, backward in layers]
    assert sent(laid, sizes, backward=True, at_least=rows) == gradients[:0:-1], "the first layer's input needs none"


def test_weights_of_a_chain_and_their_gradients_are_held_by_one_rank_each() -> None:
    joint = decomposed(Chain((48, 96, 48, 96)), torch.randn(512, 48))
    laid = lay_out(joint, Pins(), collectives_count(), y=2, x=2)
    found = [(laid.parameter(f"layers.{i}.weight"), laid.parameter(f"layers.{i}.bias")) for i in range(3)]
    inner, outer = "yx" if found[0][0].startswith("[2@y") else "xy"
    assert found == [
        (f"[2@{inner}*48, 2@{outer}*24]", f"[2@{inner}*48]"),
        (f"[2@{outer}*24, 2@{inner}*48]", f"[2@{outer}*24]"),
        (f"[2@{inner}*48, 2@{outer}*24]", f"[2@{inner}*48]"),
    ]
    assert [laid.gradient(f"layers.{i}.weight") for i in range(3)] == [weight for weight, _ in found]


def test_the_papers_layer_sends_as_many_elements_as_it_says() -> None:
    """32,768 x 7,168 by 7,168 x 28,672 on G = (2, 2, 4, 1): the traced program has the batch of one z rank."""
    rows, width, columns = 32768 // 4, 7168, 28672
    with torch.device("meta"):
        joint = decomposed(Chain((width, width, width, columns)), torch.randn(rows, width))
    laid = lay_out(joint, Pins(), collectives_count(latency_us=1e6), y=2, x=2, z=4)
    sizes = {"y": 2, "x": 2}
    forward, backward = (sent(laid, sizes, backward=direction, at_least=rows) for direction in (False, True))
    (result, along, of_result), (gradient, across, of_gradient) = forward[-1], backward[0]
    assert (result, of_result) == (gradient, of_gradient * 4) == ("all_reduce", 117_440_512)
    assert {along, across} == {"y", "x"}, "the axes have the same size, so that either may be first"


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


def reduced_in(name: str, sizes: dict[str, int], *, transposed: bool) -> tuple[Counter[Sent], Counter[Sent]]:
    """What blocks reduce in the forward and in the backward, if the rows of qkv lie over y or, transposed, over x.

    The gradients of weights that read one value are added up before they are reduced.
    """
    forward: Counter[Sent] = Counter()
    backward: Counter[Sent] = Counter()

    def note(width: int, columns: tuple[int, ...], times: int, *, transposed: bool) -> None:
        reduced = [by_equations(ROWS, width, number, sizes, transposed=transposed) for number in columns]
        forward.update({s: times * count for s, count in Counter(result for result, _ in reduced).items()})
        backward[reduced[0][1]] += times

    for columns, rows in zip(MODELS[name].inner, MODELS[name].outer, strict=True):
        note(WIDTH, columns, LAYERS, transposed=transposed)
        note(rows, (WIDTH,), LAYERS, transposed=not transposed)
    return forward, backward


@pytest.mark.parametrize("name", MODELS)
def test_products_of_a_transformer_reduce_as_the_equations_say(name: str) -> None:
    """Along one axis before attention and in the MLP's middle, along the other after both. Norms may gather."""
    laid = laid_out_on_plane(name)
    forward, backward = (
        Counter(s for s in sent(laid, PLANE, backward=direction, at_least=4 * ROWS) if s[0] == "all_reduce")
        for direction in (False, True)
    )
    expected = reduced_in(name, PLANE, transposed=False)
    assert not expected[0] - forward and not expected[1] - backward
    embedding, head = ROWS * WIDTH / 2, ROWS * VOCABULARY / 2
    assert sorted(elements for _, _, elements in (forward - expected[0]).elements()) == [embedding, head]
    assert [elements for _, _, elements in (backward - expected[1]).elements()] == [embedding], "that of the head"
    assert {c.kind for c in laid.collectives} <= {"all_reduce", "all_gather"}


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_split_by_heads_and_the_loss_by_words(name: str) -> None:
    laid = laid_out_on_plane(name)
    nodes = [node for node in laid.joint.module.graph.nodes if node.op == "call_function"]
    attended = [node for node in nodes if "scaled_dot_product" in str(node.target)]
    assert attended
    for node in attended:
        for layout in node_meta.placed(node).inputs[:3]:
            assert layout.placement("x") == Shard(1, 2), f"heads over x: {node}, {layout}"
    logits = [
        layout
        for node in nodes
        for layout in node_meta.placed(node).outputs
        if layout is not None and math.prod(layout.shape) == ROWS * VOCABULARY and is_float(node)
    ]
    assert logits and all(math.prod(local(layout)) <= ROWS * VOCABULARY / 2 for layout in logits)
    assert not [c for c in laid.collectives if c.kind == "all_gather" and c.num_bytes >= 4 * ROWS * VOCABULARY]


def is_float(node: fx.Node) -> bool:
    return node_meta.tensor(node).is_floating_point()


def local(layout: Layout) -> tuple[int, ...]:
    return layout.local_shape({"y": 0, "x": 0})


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_used_as_the_shard_that_its_rank_stores(name: str) -> None:
    check_weights(laid_out_on_plane(name), PLANE)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_weights_are_stored_in_shards_over_a_single_axis(axis: str) -> None:
    check_weights(lay_out(model_graph("gpt"), Pins(), collectives_count(), **{axis: 2}), {axis: 2})


def check_weights(laid: LaidOut, sizes: dict[str, int]) -> None:
    """Each rank has its part of weights and gradients, and no collective makes a weight whole."""
    parts = math.prod(sizes.values())
    weights = {port: layout for port, layout in laid.border.inputs.items() if is_weight(port, layout)}
    assert len(weights) > 4 * LAYERS
    for port, layout in weights.items():
        assert parts * math.prod(local(layout)) == math.prod(layout.shape), f"{port}: {layout}"
        assert laid.border.gradients[port] == layout
    placeholders = laid.joint.module.graph.find_nodes(op="placeholder")
    for node, port in zip(placeholders, laid.joint.inputs, strict=False):
        for user in node.users:
            if port in weights and user.op == "call_function":
                position = user.all_input_nodes.index(node)
                assert node_meta.placed(user).inputs[position] == weights[port], f"{port} at {user}"


def is_weight(port: Port, layout: Layout) -> bool:
    return port.kind is PortKind.PARAMETER and len(layout.shape) > 1


def test_a_hint_for_x_leaves_y_to_be_chosen() -> None:
    model = Chain((48, 96, 48))
    joint = decomposed(model, torch.randn(512, 48))
    hints: dict[str, Spec] = {"layers.0.weight": (None, "x"), "layers.1.weight": (None, None)}
    laid = lay_out(joint, pins_of(model, hints), collectives_count(), y=2, x=2)
    assert laid.parameter("layers.0.weight") == "[2@y*48, 2@x*24]"
    assert laid.parameter("layers.1.weight") == "[48, 96]", "a hint that names no axis asks for the whole"


class Symmetric(nn.Module):
    """A product with a matrix and its transpose, added: it cannot be used in shards of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.root = nn.Linear(32, 32, bias=False), nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) @ (self.root + self.root.t())).square().sum()


def test_a_weight_that_cannot_be_used_in_shards_gives_way_and_is_named() -> None:
    joint = decomposed(Symmetric(), torch.randn(512, 32))
    with pytest.warns(UserWarning, match=r"along x \(2\) hold the same of 1 weights .*: root; "):
        laid = lay_out(joint, Pins(), collectives_count(), x=2)
    assert laid.parameter("root") == "[32, 32]"
    assert "@x" in laid.parameter("first.weight"), "the others are sharded as before"


def test_a_dim_that_does_not_divide_is_cut_unevenly() -> None:
    model = GPT(vocabulary=97, width=24, length=12, layers=1)
    tokens = torch.zeros(2, 12, dtype=torch.long)
    joint = decomposed(model, tokens, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        laid = lay_out(joint, Pins(), collectives_count(), y=2, x=2)
    assert sorted(laid.parameter("head.weight").replace("y", "x").split(", ")) == ["2@x*12]", "[2@x*49"]


@pytest.mark.parametrize("sizes", [{"y": 2, "x": 2}, {"y": 2, "x": 3}], ids=str)
def test_all_ranks_of_a_plane_compute_the_joint_graph(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    joint = decomposed(Chain((12, 24, 18, 12)).double(), torch.randn(10, 12, dtype=torch.double))
    lay_out(joint, Pins(), collectives_count(), **sizes)
    inputs = inputs_of(joint, 0)
    with fake_mesh(**sizes) as mesh:
        found = run_local_graphs(joint, mesh, inputs)
    check_pieces(joint, mesh, found, joint.module(*inputs))


def test_a_cache_that_nobody_reads_costs_no_message_and_no_memory() -> None:
    """That of a decoder is made by a concatenation with nothing, and kept on an object."""
    found = []
    for use_cache in (False, True):
        model = hf_llama(layers=1)
        model.config.use_cache = use_cache
        pins = pins_of(model, LLAMA_HINTS)
        ids = torch.zeros(2, 8, dtype=torch.long)
        capture, _ = captured(model, {"input_ids": ids, "labels": ids})
        assert len(capture.kept) == 2 * use_cache and len(capture.results) == 2
        (stage,) = split_stages(capture, [])
        joint = in_parts(trace_joint(stage, with_backward=True))
        laid = lay_out(joint, pins, prices(), x=2)
        with fake_mesh(x=2) as mesh:
            local = insert_collectives(laid.joint, mesh)
        kept = activation_memory(local, partition(local)).saved_bytes
        found.append((laid.count(backward=False), laid.count(backward=True), kept))
    without, cached = found
    assert cached[:2] == without[:2] and cached[2] <= without[2]
