"""Ops in parts compute what the whole ops did, and the graph around them stays as it was."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpar.ir.node_meta import is_backward, module_path
from fxpar.passes.decompose.decompositions import DECOMPOSITIONS
from fxpar.passes.decompose.norm_decompositions import NORMS
from fxpar.passes.decompose.norm_policy import ONE_RANK, NormPolicy
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.rules import rule_for
from fxpar.rules.call import argument, op_call
from fxpar.rules.losses import LOSSES_OF_ELEMENTS, LOSSES_OF_ELEMENTS_BACKWARD, NO_REDUCTION
from tests.support.joint_graphs import joint_graph
from tests.support.small_models import GPT, hf_gpt2, hf_llama

aten = torch.ops.aten
CONVOLUTION_BACKWARD = aten.convolution_backward.default
ELEMENTS = {*LOSSES_OF_ELEMENTS, *LOSSES_OF_ELEMENTS_BACKWARD}
"""Of these, only the reductions are ops of their own afterwards."""


class _Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def joint_of(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """The joint graph of a function; floating-point arguments have gradients."""
    leaves = [arg.clone().requires_grad_(arg.is_floating_point()) for arg in args]
    return joint_graph(_Function(function), *leaves).module


def ops(module: fx.GraphModule) -> list[Any]:
    """The ops that a graph calls, in order."""
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def run(module: fx.GraphModule, low: int, high: int) -> list[Tensor]:
    """The outputs for random inputs: integers of [low, high), values of unit variance."""
    torch.manual_seed(0)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        random = torch.randn(like.shape) if like.is_floating_point() else torch.randint(low, high, like.shape)
        inputs.append(random.to(like.dtype))
    return [output for output in module(*inputs) if output is not None]


def assert_same_function(
    joint: fx.GraphModule, low: int = 0, high: int = 7, norm_policy: NormPolicy = ONE_RANK
) -> fx.GraphModule:
    """Decompose a graph and compare all outputs, gradients among them."""
    decomposed = decompose_for_sharding(joint, norm_policy)
    assert not set(ops(decomposed)) & (set(DECOMPOSITIONS) - {CONVOLUTION_BACKWARD} - ELEMENTS)
    expected, found = run(joint, low, high), run(decomposed, low, high)
    for e, f in zip(expected, found, strict=True):
        loose = e.dtype in (torch.float16, torch.bfloat16)
        # Small sums of large terms round by the size of the terms.
        atol = 2e-2 if loose else 1e-5 * max(1.0, e.abs().max().item())
        torch.testing.assert_close(f, e, rtol=2e-2 if loose else 1e-5, atol=atol)
        assert f.stride() == e.stride()
    return decomposed


def test_a_bias_is_added_once_after_the_product() -> None:
    joint = joint_of(F.linear, torch.randn(4, 6), torch.randn(8, 6), torch.randn(8))
    assert aten.addmm.default in ops(joint)
    decomposed = assert_same_function(joint)
    forward = [node.target for node in decomposed.graph.nodes if node.op == "call_function" and not is_backward(node)]
    assert forward == [aten.t.default, aten.mm.default, aten.add.Tensor]


@pytest.mark.parametrize("factors", [{}, {"beta": 0.5}, {"alpha": 3.0, "beta": 2.0}])
def test_scaled_products_keep_their_factors(factors: dict[str, float]) -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 8)
    assert_same_function(joint_of(lambda c, a, b: torch.addmm(c, a, b, **factors), torch.randn(8), a, b))
    a, b = torch.randn(2, 4, 6), torch.randn(2, 6, 8)
    assert_same_function(joint_of(lambda c, a, b: torch.baddbmm(c, a, b, **factors), torch.randn(2, 4, 8), a, b))


@pytest.mark.parametrize(
    "mean",
    [
        lambda x: x.mean(),
        lambda x: x.mean(-1),
        lambda x: x.mean((0, 2), keepdim=True),
        lambda x: x.mean(1, dtype=torch.float64),
    ],
)
def test_a_mean_is_a_sum_over_a_count(mean: Callable[[Tensor], Tensor]) -> None:
    decomposed = assert_same_function(joint_of(mean, torch.randn(3, 4, 5)))
    assert aten.sum.dim_IntList in ops(decomposed)


@pytest.mark.parametrize("order", [2, 1, 3, 0.5, 0, math.inf, -math.inf])
@pytest.mark.parametrize("dims", [{}, {"dim": -1}, {"dim": (0, 2), "keepdim": True}, {"dtype": torch.float64}], ids=str)
def test_a_norm_is_a_root_of_a_sum_or_a_maximum(order: float, dims: dict[str, Any]) -> None:
    decomposed = assert_same_function(
        joint_of(lambda x: torch.linalg.vector_norm(x, order, **dims), torch.randn(3, 4, 5))
    )
    assert {aten.sum.dim_IntList, aten.amax.default, aten.amin.default} & set(ops(decomposed))


@pytest.mark.parametrize("dims", [{"dim": -1}, {"dim": (0, 2), "keepdim": True}, {"dim": (0, 1, 2)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logsumexp(dims: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_function(joint_of(lambda x: torch.logsumexp(x, **dims), torch.randn(3, 4, 5, dtype=dtype)))


def test_logsumexp_of_what_is_infinite() -> None:
    excluded = torch.tensor([True, True, False, True])
    for mask in (excluded, torch.ones_like(excluded)):
        joint = joint_of(lambda x, mask=mask: x.masked_fill(mask, -math.inf).logsumexp(-1).exp(), torch.randn(3, 4))
        assert_same_function(joint)


def test_a_mean_in_half_precision_does_not_overflow() -> None:
    joint = joint_of(lambda x: (x + 300).mean(), torch.randn(40, 40, dtype=torch.float16))
    assert_same_function(joint)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_softmax(dim: int, dtype: torch.dtype) -> None:
    assert_same_function(joint_of(lambda x: F.log_softmax(x, dim), torch.randn(3, 4, 5, dtype=dtype)))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("with_weight", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("shape", [(7,), (6, 7), (2, 7, 3, 4)], ids=str)
@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy])
def test_losses(loss: Callable[..., Tensor], shape: tuple[int, ...], with_weight: bool, reduction: str) -> None:
    def function(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        chosen = weight.detach().abs() if with_weight else None
        return loss(x, target, chosen, reduction=reduction, ignore_index=2)

    target = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.long)
    assert_same_function(joint_of(function, torch.randn(shape), target, torch.ones(7)))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_squared_errors(reduction: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y, reduction=reduction)

    assert_same_function(joint_of(function, torch.randn(2, 5), torch.randn(2, 5)))


def binary(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), y.detach().abs(), **options)


def logits(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    weights = y.detach().abs()
    return F.binary_cross_entropy_with_logits(x, y, weights, pos_weight=weights[0], **options)


def margins(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.soft_margin_loss(x, y.detach().sign(), **options)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("loss", [binary, logits, margins, F.huber_loss, F.smooth_l1_loss])
def test_losses_of_elements_are_reduced_apart(loss: Callable[..., Tensor], reduction: str) -> None:
    joint = joint_of(functools.partial(loss, reduction=reduction), torch.randn(4, 5), torch.randn(4, 5))
    decomposed = assert_same_function(joint)
    assert {node.target for node in decomposed.graph.nodes} & ELEMENTS
    assert all(op is operator.getitem or rule_for(op) is not None for op in ops(decomposed))
    losses = [op_call(node) for node in decomposed.graph.nodes if node.target in ELEMENTS]
    assert all(argument(call, "reduction") == NO_REDUCTION for call in losses)


@pytest.mark.parametrize("dim", [0, 2])
def test_weights_are_normalized_in_parts(dim: int) -> None:
    joint = joint_of(
        lambda v, g: torch._weight_norm(v, g, dim),
        torch.randn(4, 6, 5),
        torch.randn((dim == 0 and (4, 1, 1)) or (1, 1, 5)),
    )
    assert aten._weight_norm_interface_backward.default in ops(joint)
    assert_same_function(joint)


@pytest.mark.parametrize("function", [F.pixel_shuffle, F.pixel_unshuffle])
@pytest.mark.parametrize("shape", [(4, 4, 6), (2, 3, 8, 2, 4)], ids=str)
def test_pixels_are_shuffled_by_views(function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    decomposed = assert_same_function(joint_of(lambda x: function(x, 2), torch.randn(shape)))
    assert all(rule_for(op) is not None for op in ops(decomposed))


def test_rows_to_be_ignored_have_no_gradient_even_outside_of_the_classes() -> None:
    joint = joint_of(F.cross_entropy, torch.randn(6, 7), torch.zeros(6, dtype=torch.long))
    decomposed = decompose_for_sharding(joint)
    x, target = torch.randn(6, 7), torch.tensor([1, -100, 6, -100, 0, 3])
    for expected, found in zip(joint(x, target, torch.ones(())), decomposed(x, target, torch.ones(())), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_gradient_of_cross_entropy_sums_over_no_classes() -> None:
    decomposed = assert_same_function(joint_of(F.cross_entropy, torch.randn(6, 7), torch.zeros(6, dtype=torch.long)))
    backward = [node.target for node in decomposed.graph.nodes if node.op == "call_function" and is_backward(node)]
    assert aten.sum.dim_IntList not in backward


def test_log_probabilities_used_twice_keep_both_gradients() -> None:
    def function(x: Tensor, target: Tensor) -> Tensor:
        log_probs = F.log_softmax(x, 1)
        return F.nll_loss(log_probs, target) + log_probs.pow(2).sum()

    assert_same_function(joint_of(function, torch.randn(6, 7), torch.zeros(6, dtype=torch.long)))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_gradients_of_a_convolution_are_ops_of_their_own(groups: int) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, stride=2, padding=1, groups=groups)

    joint = joint_of(function, torch.randn(2, 4, 5, 6), torch.randn(6, 4 // groups, 3, 3), torch.randn(6))
    gradients = [node for node in decompose_for_sharding(joint).graph.nodes if node.target is CONVOLUTION_BACKWARD]
    assert [node.args[10] for node in gradients] == [[True, False, False], [False, True, False]]
    assert_same_function(joint)


NORMED = torch.randn(3, 4, 6)
OVER_HIDDEN = NormPolicy(num_ranks=2, shards_hidden=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "shapes"),
    [
        (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(6,), (6,)]),
        (lambda x, w: F.layer_norm(x, (4, 6), w), [(4, 6)]),
        (lambda x: F.layer_norm(x, (3, 4, 6)), []),
        (lambda x, w: aten._fused_rms_norm(x, [6], w, 1e-6)[0], [(6,)]),
        (lambda x: aten._fused_rms_norm(x, [6], None, None)[0], []),
    ],
    ids=["layer", "layer_of_two_dims", "layer_of_all", "rms", "rms_without_weight"],
)
def test_norms_over_a_sharded_hidden_dim(
    norm: Callable[..., Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    joint = joint_of(norm, NORMED.to(dtype), *(torch.randn(shape, dtype=dtype) for shape in shapes))
    decomposed = assert_same_function(joint, norm_policy=OVER_HIDDEN)
    assert not set(ops(decomposed)) & set(NORMS)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 8, 3, 4), (3, 8)], ids=str)
def test_norms_of_fewer_groups_than_ranks(shape: tuple[int, ...], affine: bool) -> None:
    def function(x: Tensor, *per_channel: Tensor) -> Tensor:
        return F.group_norm(x, 2, *per_channel)

    joint = joint_of(function, torch.randn(shape), *(torch.randn(2, 8) if affine else ()))
    decomposed = assert_same_function(joint, norm_policy=NormPolicy(num_ranks=4))
    assert not set(ops(decomposed)) & set(NORMS)


def test_norms_stay_whole_where_no_gain_is_in_sight() -> None:
    def function(x: Tensor) -> Tensor:
        return F.layer_norm(F.group_norm(x, 2), (6,))

    joint = joint_of(function, torch.randn(3, 4, 6))
    for norm_policy in (ONE_RANK, NormPolicy(num_ranks=2), NormPolicy(num_ranks=3)):
        assert ops(decompose_for_sharding(joint, norm_policy)).count(aten.native_layer_norm.default) == 1
        assert ops(decompose_for_sharding(joint, norm_policy)).count(aten.native_group_norm.default) == 1


def test_the_variance_of_a_large_mean_is_exact() -> None:
    joint = joint_of(lambda x: F.layer_norm(x, (512,)), torch.randn(4, 512))
    x = torch.randn(4, 512) + 1000
    found, expected = decompose_for_sharding(joint, OVER_HIDDEN)(x, x)[0], F.layer_norm(x.double(), (512,))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


def test_the_sums_of_a_norms_gradient_are_reduced_together() -> None:
    joint = joint_of(lambda x, w, b: F.layer_norm(x, (6,), w, b), NORMED, torch.randn(6), torch.randn(6))
    graph = decompose_for_sharding(joint, OVER_HIDDEN).graph
    rows = [node for node in graph.nodes if is_backward(node) and node.target is aten.stack.default]
    assert [tuple(node.meta["val"].shape) for node in rows] == [(2, 3, 4, 1)]


def test_new_tensors_depend_on_no_operand() -> None:
    def function(x: Tensor) -> Tensor:
        return x * x.new_ones(3) + x.new_zeros(2, 3) + x.new_full((2, 1), 0.5)

    decomposed = assert_same_function(joint_of(function, torch.randn(2, 3)))
    made = {aten.full.default: 2, aten.zeros.default: 1}
    assert {op: ops(decomposed).count(op) for op in made} == made


MODELS = {"gpt": GPT, "hf_gpt2": hf_gpt2, "hf_llama": hf_llama}


@pytest.fixture(scope="module", params=MODELS)
def model_joint(request: pytest.FixtureRequest) -> fx.GraphModule:
    """A whole model's joint graph."""
    tokens = torch.zeros(2, 12, dtype=torch.long)
    names = ("input_ids", "labels") if request.param.startswith("hf") else ("tokens", "targets")
    return joint_graph(MODELS[request.param](layers=1), **dict.fromkeys(names, tokens)).module


def test_whole_models_compute_the_same_loss_and_gradients(model_joint: fx.GraphModule) -> None:
    assert_same_function(model_joint, high=96)


def test_placeholders_and_outputs_keep_their_order(model_joint: fx.GraphModule) -> None:
    decomposed = decompose_for_sharding(model_joint)
    before, after = (m.graph.find_nodes(op="placeholder") for m in (model_joint, decomposed))
    assert [node.name for node in after] == [node.name for node in before]
    assert [node.meta["val"].shape for node in after] == [node.meta["val"].shape for node in before]


def test_every_node_is_tagged_and_nothing_forward_depends_on_backward(model_joint: fx.GraphModule) -> None:
    for node in decompose_for_sharding(model_joint).graph.nodes:
        if node.op != "output":
            assert node.meta["partitioner_tag"] in ("is_forward", "is_backward")
            assert is_backward(node) or not any(map(is_backward, node.all_input_nodes))


def test_parts_know_where_they_come_from_and_what_they_give(model_joint: fx.GraphModule) -> None:
    decomposed = decompose_for_sharding(model_joint)
    origins = {module_path(node) for node in model_joint.graph.nodes}
    products = [node for node in decomposed.graph.nodes if node.target is aten.mm.default]
    assert {module_path(node) for node in products} <= origins - {""}
    assert all("val" in node.meta for node in decomposed.graph.nodes if node.op != "output")


def test_checks_of_logical_metadata_are_dropped(model_joint: fx.GraphModule) -> None:
    assert aten._assert_tensor_metadata.default not in ops(decompose_for_sharding(model_joint))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch._foreach_mul([a, b], 2.0),
        lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2),
        lambda a, b: torch._foreach_div([a, b], [2.0, 3.0]),
        lambda a, b: torch._foreach_mul([a, b], torch.tensor(3.0)),
        lambda a, b: torch._foreach_lerp([a], [b], 0.3),
        lambda a, b: torch._foreach_pow([a, b], 2),
        lambda a, b: torch._foreach_clamp_min([a, b], 0.5),
        lambda a, b: torch._foreach_abs([a, b]),
    ],
)
def test_ops_of_lists_are_those_of_their_tensors(function: Callable[..., Any]) -> None:
    joint = joint_of(function, torch.randn(3, 4), torch.randn(3, 4))
    assert any("_foreach_" in str(op) for op in ops(joint))
    decomposed = assert_same_function(joint)
    assert not any(op is operator.getitem for op in ops(decomposed))
