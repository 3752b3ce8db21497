"""Every row of the table is right, on PyTorch's own samples and on some written for what those leave out."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from op_calls import Call, Recorder
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from fxpar.ir.random import random_state, streams
from fxpar.rules import rule_for
from fxpar.rules.losses import NO_REDUCTION
from fxpar.rules.prove import prove, prove_two_axes
from fxpar.rules.table import LIBRARY_OPS, TABLE

aten = torch.ops.aten

GPU_ONLY = {
    aten._fused_rms_norm_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}

SAMPLES_PER_OP = 8
CALLS_PER_OP = 5


@cache
def pytorch_samples() -> Mapping[Any, Sequence[Call]]:
    """Calls of ATen ops that PyTorch's sample inputs lead to, by op."""
    torch.manual_seed(0)
    recorder = Recorder()
    for info in op_db:
        dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in info.dtypes), None)
        if dtype is None or info.name.startswith("jiterator"):
            continue  # complex numbers alone; GPUs alone
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = info.sample_inputs_func(info, "cpu", dtype, False)  # info.sample_inputs walks the stack each time
            for sample in islice(samples, SAMPLES_PER_OP):
                with recorder:
                    info(sample.input, *sample.args, **sample.kwargs)
    found: dict[Any, dict[str, Call]] = defaultdict(dict)
    for call in recorder.calls:
        if rule_for(call.target) is not None and call.num_elements < 2000:
            found[call.target].setdefault(call.key, call)
    return {target: list(calls.values())[:CALLS_PER_OP] for target, calls in found.items()}


def written_samples() -> list[Call]:
    """Calls of what PyTorch's samples leave out, and of dims of many divisors."""
    torch.manual_seed(0)
    x, row, weight = torch.randn(4, 6, 8), torch.randn(4, 6, 1), torch.randn(8)
    apart = torch.randn(4, 6, 8, 6)  # two of its dims are indexed, which are not neighbours
    spoken = (
        torch.randn(8, 4, 6).log_softmax(-1),
        torch.randint(1, 6, (4, 3)),
        torch.tensor([8, 7, 8, 5]),
        torch.arange(4),
    )
    return [
        Call(*call, {})
        for call in (
            (aten.mm.default, (torch.randn(8, 12), torch.randn(12, 16))),
            *_shapes(x, row),
            *_slices(x),
            (aten.repeat.default, (torch.randn(4, 6), [2, 3, 2])),
            (aten.constant_pad_nd.default, (x, [0, 0, 1, 2], 0.5)),
            (aten.lift_fresh_copy.default, (x,)),
            (torch.ops.fxpar.shard.default, (x, '["x", null, null]')),
            (torch.ops.fxpar.batch_mean.default, (x,)),
            (aten.copy.default, (x, row)),
            (aten.arange.default, (24,)),
            (aten.arange.start_step, (3, 51, 2)),
            (aten.arange.default, (24.0,)),
            (aten.arange.start_step, (0, 0.3, 0.1)),
            (torch.ops.fxpar.uniform.default, (stream(5, chunk=0), [4, 6], [4, 6], [6, 1], 0, 24)),
            (torch.ops.fxpar.uniform.default, (stream(5, chunk=2), [7, 2], [7, 2], [2, 1], 0, 14)),
            (torch.ops.fxpar.ctc_losses.default, (*spoken, 0, True)),
            (torch.ops.fxpar.ctc_losses_backward.default, (torch.randn(4), *spoken, 0, True)),
            *_indices(x, apart),
            (aten.view_as_real.default, (torch.view_as_complex(x.view(4, 6, 4, 2)),)),
            (aten.hardswish_backward.default, (x, x + 1)),
            (aten.mish_backward.default, (x, x + 1)),
            (aten.hardsigmoid_backward.default, (x, x + 1)),
            (aten.hardshrink_backward.default, (x, x + 1, 0.5)),
            (aten.softshrink_backward.default, (x, x + 1, 0.5)),
            (aten.hardtanh_backward.default, (x, x + 1, -1, 1)),
            (aten.leaky_relu_backward.default, (x, x + 1, 0.1, False)),
            (aten.elu_backward.default, (x, 1.0, 1.0, 1.0, False, x + 1)),
            (aten._prelu_kernel_backward.default, (x, x + 1, weight.expand(4, 6, 8))),
            (aten.glu_backward.default, (torch.randn(4, 3, 8), x, 1)),
            (aten.im2col.default, (torch.randn(4, 6, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1])),
            (aten.col2im.default, (torch.randn(4, 24, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1])),
            (aten.fill.Scalar, (x, 2.0)),
            (aten.fill.Tensor, (x, torch.tensor(2.0))),
            (aten.log_sigmoid_forward.default, (x,)),
            (aten.log_sigmoid_backward.default, (x, x + 1, torch.exp(-(x + 1).abs()))),
            (aten.diagonal.default, (x, 1, 2, -2)),
            (aten.diagonal_backward.default, (torch.randn(4, 6), [4, 6, 8], 0, 1, 2)),
            (aten.unfold.default, (x, 1, 2, 2)),
            (aten.unfold_backward.default, (torch.randn(4, 3, 8, 2), [4, 6, 8], 1, 2, 2)),
            (aten.softplus_backward.default, (x, x + 1, 1.5, 20)),
            (aten.histc.default, (torch.arange(24.0), 4, 0, 24)),
            (aten.flip.default, (x, [0, -1])),
            (aten._log_softmax_backward_data.default, (x, x.log_softmax(1), 1, torch.float32)),
            *_losses_of_elements(x),
            (aten._cdist_forward.default, (x, torch.randn(4, 9, 8), 2.0, None)),
            (
                aten._cdist_backward.default,
                (torch.randn(4, 6, 9), x, torch.randn(4, 9, 8), 2.0, torch.rand(4, 6, 9) + 1),
            ),
            *_grouped_matmuls(),
            *_convolutions(),
            *_norms(x, row, weight),
            *_group_norms(),
            *_batch_norms(),
            *_pools(),
            *_resampled(),
            *_embeddings(),
            *_attention(),
        )
    ] + _solved()


def stream(number: int, chunk: int) -> Tensor:
    """What an op draws from in one microbatch."""
    (found,) = streams(random_state(3, 1, chunk, 1), [number])
    return found


def _losses_of_elements(x: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    target, sign = (x + 0.3).sigmoid(), x.sign()
    return [
        (aten.binary_cross_entropy.default, (x.sigmoid(), target, torch.rand(8), NO_REDUCTION)),
        (aten.binary_cross_entropy_backward.default, (x, x.sigmoid(), target, torch.rand(8), NO_REDUCTION)),
        (aten.binary_cross_entropy_with_logits.default, (x, target, None, torch.rand(8), NO_REDUCTION)),
        (aten.huber_loss.default, (x, target, NO_REDUCTION, 0.5)),
        (aten.huber_loss_backward.default, (x + 1, x, target, NO_REDUCTION, 0.5)),
        (aten.smooth_l1_loss.default, (x, target, NO_REDUCTION, 0.5)),
        (aten.smooth_l1_loss_backward.default, (x + 1, x, target, NO_REDUCTION, 0.5)),
        (aten.soft_margin_loss.default, (x, sign, NO_REDUCTION)),
        (aten.soft_margin_loss_backward.default, (x + 1, x, sign, NO_REDUCTION)),
    ]


def _shapes(x: Tensor, row: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    return [
        (aten.view.default, (x, [24, 8])),
        (aten.view.default, (x.reshape(24, 8), [4, 6, 2, 4])),
        (aten.view.default, (x.permute(2, 1, 0), [2, 4, 6, 4])),
        (aten.reshape.default, (x.transpose(0, 1), [24, 8])),
        (aten.expand.default, (row, [4, 6, 12])),
        (aten.split.Tensor, (torch.randn(4, 24), 8, 1)),
        (aten.split_with_sizes.default, (torch.randn(4, 24), [8, 8, 8], 1)),
        (aten.split_with_sizes.default, (torch.randn(4, 24), [16, 4, 4], 1)),
        (aten.unsafe_split_with_sizes.default, (torch.randn(4, 24), [16, 4, 4], 1)),
        (aten.cat.default, ([torch.randn(4, 8)] * 3, 1)),
        (aten.cat.default, ([torch.randn(4, 16), torch.randn(4, 8)], 1)),
        (aten.stack.default, ([torch.randn(4, 8)] * 3, 1)),
    ]


def _slices(x: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    return [
        (aten.slice.Tensor, (torch.randn(4, 24), 1, 8, 16)),
        (aten.slice.Tensor, (torch.randn(4, 24), -1, -8)),
        (aten.slice.Tensor, (torch.randn(4, 24), 1, 8, 24)),
        (aten.slice.Tensor, (torch.randn(4, 24), 1, 12, 20)),
        (aten.slice.Tensor, (torch.randn(4, 24), 1, 0, 24, 2)),
        (aten.slice_backward.default, (torch.randn(4, 8), [4, 24], 1, 16, 24, 1)),
        (aten.slice_backward.default, (torch.randn(4, 16), [4, 24], 1, 4, 20, 1)),
        (aten.slice_backward.default, (torch.randn(4, 24), [4, 24], 1, 0, 2**63 - 1, 1)),
        (aten.select_backward.default, (torch.randn(4, 8), [4, 6, 8], 1, 2)),
        (aten.slice_scatter.default, (x, torch.randn(4, 2, 8), 1, 2, 4)),
        (aten.new_empty_strided.default, (x, [4, 6, 8], [1, 4, 24])),
        (aten.unbind.int, (x, 1)),
    ]


def _indices(x: Tensor, apart: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    return [
        (aten.scatter.value, (torch.randn(4, 6), 1, torch.randint(6, (4, 2)), 1.5)),
        (aten.index.Tensor, (x, [None, torch.randint(6, (4, 1)), torch.randint(8, (1, 2))])),
        (aten.index.Tensor, (x, [torch.randint(4, (6,)), None, torch.randint(8, (6,))])),
        (aten.index.Tensor, (apart, [None, torch.randint(6, (6,)), None, torch.randint(6, (6,))])),
        (aten._unsafe_index.Tensor, (x, [None, None, torch.randint(8, (16,))])),
        (aten._unsafe_index_put.default, (x, [None, None, torch.tensor([0, 3, 3])], torch.randn(4, 6, 3), True)),
        (aten._unsafe_index_put.default, (x, [torch.tensor([[2], [1]]), torch.tensor([5, 2])], torch.randn(8))),
        (aten.index_put.default, (x, [None, torch.tensor([5, 2])], torch.randn(4, 1, 8), True)),
        (aten.index_put.default, (apart, [None, torch.arange(6), None, torch.arange(6)], torch.randn(6, 4, 8))),
        (aten.gather.default, (x, 1, torch.randint(6, (2, 4, 8)))),
        (aten.embedding_dense_backward.default, (torch.randn(4, 6, 8), torch.arange(24).view(4, 6) % 8, 8, 0, False)),
    ]


def _convolutions() -> list[tuple[Any, tuple[Any, ...]]]:
    """In 1 to 3 dims, transposed and not, in groups and not."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for size, channels, groups, transposed, bias in (
        ((6,), 4, 1, False, True),
        ((2, 3, 3), 3, 1, False, False),
        ((5, 6), 8, 4, False, True),
        ((4, 3), 3, 1, True, True),
        ((4, 3), 4, 2, True, False),
    ):
        x, each = torch.randn(2, channels, *size), channels // groups
        weight, one = torch.randn(channels, each, *[3] * len(size)), [1] * len(size)
        geometry = [2, *one[1:]], one, one, transposed, [0] * len(size), groups
        y = aten.convolution.default(x, weight, None, *geometry)
        calls.append((aten.convolution.default, (x, weight, torch.randn(channels) if bias else None, *geometry)))
        for mask in ([True, True, False], [False, True, True]):
            operands = torch.randn_like(y), x, weight, [channels] if bias else None
            calls.append((aten.convolution_backward.default, (*operands, *geometry, mask)))
    return calls


def _group_norms() -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for shape, groups, affine in (((4, 12, 3, 5), 6, True), ((4, 12, 3), 12, True), ((1, 6, 2, 2), 3, False)):
        x, (rows, channels, *_) = torch.randn(shape), shape
        x = x.to(memory_format=torch.channels_last) if rows == 1 else x
        weight, bias = (torch.randn(channels), torch.randn(channels)) if affine else (None, None)
        sizes = rows, channels, x[0, 0].numel(), groups
        _, mean, rstd = aten.native_group_norm.default(x, weight, bias, *sizes, 1e-5)
        calls.append((aten.native_group_norm.default, (x, weight, bias, *sizes, 1e-5)))
        calls.append(
            (aten.native_group_norm_backward.default, (x + 1, x, mean, rstd, weight, *sizes, [True, affine, affine]))
        )
    return calls


def _batch_norms() -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for shape in ((4, 6), (4, 6, 3, 2)):
        x, weight, mean, variance = torch.randn(shape), torch.randn(6), torch.randn(6), torch.rand(6) + 1
        _, batch_mean, batch_rstd = aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0.1, 1e-5)
        operands, none = (x + 1, x, weight, mean, variance), torch.empty(0)
        calls += [
            (aten._native_batch_norm_legit.no_stats, (x, weight, weight, True, 0.1, 1e-5)),
            (aten._native_batch_norm_legit_no_training.default, (x, weight, weight, mean, variance, 0.1, 1e-5)),
            (aten.native_batch_norm_backward.default, (*operands, batch_mean, batch_rstd, True, 1e-5, [True] * 3)),
            (aten.native_batch_norm_backward.default, (*operands, none, none, False, 1e-5, [True] * 3)),
        ]
        for trains in (True, False):
            statistics = mean, variance, trains, 0.1, 1e-5
            calls.append((aten._native_batch_norm_legit_functional.default, (x, weight, weight, *statistics)))
    return calls


def _solved() -> list[Call]:
    matrix, known = torch.randn(4, 6, 6).triu() + 3 * torch.eye(6), torch.randn(4, 6, 8)
    solve = aten.linalg_solve_triangular.default
    return [
        Call(solve, (matrix, known), {"upper": True}),
        Call(solve, (matrix, known.mT), {"upper": True, "left": False}),
    ]


def _pools() -> list[tuple[Any, tuple[Any, ...]]]:
    plane, box = torch.randn(4, 6, 5, 4), torch.randn(2, 3, 3, 4, 4)
    taken, where = aten.max_pool2d_with_indices.default(plane, [2, 2])
    of_plane, place = aten.adaptive_max_pool2d.default(plane, [2, 2])
    in_box, at = aten.max_pool3d_with_indices.default(box, [2] * 3)
    adapted, places = aten.adaptive_max_pool3d.default(box, [2] * 3)
    window, of_box = ([2, 2], [2, 2], [0, 0], False, True, None), ([2] * 3, [2] * 3, [0] * 3, False, True, None)
    return [
        (aten.avg_pool2d.default, (plane, *window)),
        (aten.avg_pool2d_backward.default, (torch.randn_like(taken), plane, *window)),
        (aten.avg_pool3d.default, (box, *of_box)),
        (aten.avg_pool3d_backward.default, (torch.randn(2, 3, 1, 2, 2), box, *of_box)),
        (aten._adaptive_avg_pool2d.default, (plane, [2, 2])),
        (aten._adaptive_avg_pool2d_backward.default, (torch.randn_like(taken), plane)),
        (aten._adaptive_avg_pool3d_backward.default, (torch.randn(2, 3, 2, 2, 2), box)),
        (aten.adaptive_max_pool2d_backward.default, (torch.randn_like(of_plane), plane, place)),
        (aten.adaptive_max_pool3d_backward.default, (torch.randn_like(adapted), box, places)),
        (
            aten.max_pool3d_with_indices_backward.default,
            (torch.randn_like(in_box), box, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, at),
        ),
        (
            aten.max_pool2d_with_indices_backward.default,
            (torch.randn_like(taken), plane, [2, 2], [2, 2], [0, 0], [1, 1], False, where),
        ),
    ]


def _resampled() -> list[tuple[Any, tuple[Any, ...]]]:
    plane, large, grid = torch.randn(4, 6, 4, 3), torch.randn(4, 6, 8, 6), torch.rand(4, 5, 5, 2) * 2 - 1
    sizes = [8, 6], [4, 6, 4, 3]
    padded, box = torch.randn(4, 6, 6, 5), torch.randn(4, 6, 4, 3, 3)
    row, points = torch.randn(4, 6, 8), torch.rand(4, 5, 5, 5, 3) * 2 - 1
    return [
        (aten.upsample_nearest1d_backward.default, (torch.randn(4, 6, 8), [8], [4, 6, 4])),
        (aten.upsample_nearest2d_backward.default, (large, *sizes)),
        (aten.upsample_bilinear2d_backward.default, (large, *sizes, False)),
        (aten.upsample_bicubic2d_backward.default, (large, *sizes, False)),
        (aten._upsample_bilinear2d_aa.default, (plane, [8, 6], False)),
        (aten._upsample_bilinear2d_aa_backward.default, (large, *sizes, False)),
        (aten._upsample_bicubic2d_aa.default, (plane, [8, 6], False)),
        (aten._upsample_bicubic2d_aa_backward.default, (large, *sizes, False)),
        (aten.reflection_pad1d_backward.default, (torch.randn(4, 6, 11), row, [1, 2])),
        (aten.replication_pad1d_backward.default, (torch.randn(4, 6, 11), row, [1, 2])),
        (aten.reflection_pad2d_backward.default, (padded, plane, [1, 1, 1, 1])),
        (aten.replication_pad2d_backward.default, (padded, plane, [1, 1, 1, 1])),
        (aten.reflection_pad3d.default, (box, [1] * 6)),
        (aten.reflection_pad3d_backward.default, (torch.randn(4, 6, 6, 5, 5), box, [1] * 6)),
        (aten.replication_pad3d.default, (box, [1] * 6)),
        (aten.replication_pad3d_backward.default, (torch.randn(4, 6, 6, 5, 5), box, [1] * 6)),
        (aten.grid_sampler_3d_backward.default, (torch.randn(4, 6, 5, 5, 5), box, points, 0, 0, False, [True, True])),
        (aten.grid_sampler_2d_backward.default, (torch.randn(4, 6, 5, 5), plane, grid, 0, 0, False, [True, True])),
    ]


def _norms(x: Tensor, row: Tensor, weight: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    _, mean, rstd = aten.native_layer_norm.default(x, [8], weight, weight, 1e-5)
    _, two_mean, two_rstd = aten.native_layer_norm.default(x, [6, 8], None, None, 1e-5)
    return [
        (aten.native_layer_norm.default, (x, [6, 8], None, None, 1e-5)),
        (aten.native_layer_norm_backward.default, (x + 1, x, [8], mean, rstd, weight, weight, [True] * 3)),
        (aten.native_layer_norm_backward.default, (x + 1, x, [8], mean, rstd, weight, None, [True, True, False])),
        (aten.native_layer_norm_backward.default, (x, x, [6, 8], two_mean, two_rstd, None, None, [True, False, False])),
        (aten._fused_rms_norm.default, (x, [8], weight, 1e-5)),
    ]


def _embeddings() -> list[tuple[Any, tuple[Any, ...]]]:
    indices = torch.randint(12, (4, 6))
    gradient = torch.randn(4, 6, 8)
    return [
        (aten.embedding.default, (torch.randn(12, 8), indices)),
        (aten.embedding.default, (torch.randn(13, 8), indices, 3)),
        (aten.embedding_dense_backward.default, (gradient, indices, 12, -1, False)),
        (aten.embedding_dense_backward.default, (gradient, indices, 13, 3, False)),
        (aten.embedding_dense_backward.default, (gradient, indices, 12, -1, True)),
    ]


def _grouped_matmuls() -> list[tuple[Any, tuple[Any, ...]]]:
    rows, weights, ends = torch.randn(12, 48), torch.randn(4, 48, 96), torch.tensor([3, 3, 8, 12], dtype=torch.int32)
    gradient = torch.randn(12, 96)
    return [
        (aten._grouped_mm.default, (rows, weights, ends)),
        (aten._grouped_mm.default, (gradient, weights.mT, ends)),
        (aten._grouped_mm.default, (rows.mT, gradient, ends)),
    ]


def _attention() -> list[tuple[Any, tuple[Any, ...]]]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    q, gradient = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    for kv_heads, causal in ((4, True), (4, False), (2, True), (1, False)):
        k, v = torch.randn(2, kv_heads, 6, 8), torch.randn(2, kv_heads, 6, 8)
        out, rows = forward(q, k, v, 0.0, causal)
        calls.append((forward, (q, k, v, 0.0, causal)))
        if kv_heads == 4:
            calls.append((backward, (gradient, q, k, v, out, rows, 0.0, causal)))
    return calls


@pytest.mark.parametrize("target", [t for t in TABLE if t not in GPU_ONLY], ids=str)
def test_row_is_proved(target: Any) -> None:
    calls = [*pytorch_samples().get(target, ()), *(call for call in written_samples() if call.target is target)]
    assert calls, f"no sample of {target}: write one"
    for call in calls:
        for parts in (2, 3):
            prove(*call, parts)


def test_rules_of_libraries_ops_are_proved() -> None:
    import transformers.integrations.moe  # noqa: F401  registers them

    rows, weights, ends = torch.randn(10, 24), torch.randn(4, 24, 48), torch.tensor([3, 3, 8, 10], dtype=torch.int32)
    calls = [
        Call(torch.ops.transformers.grouped_mm_fallback.default, (rows, weights, ends), {}),
        Call(
            torch.ops.transformers.grouped_mm_fallback_backward.default,
            (rows, weights, ends, torch.randn(10, 48)),
            {},
        ),
    ]
    assert {call.target.name() for call in calls} == LIBRARY_OPS.keys()
    for call in calls:
        for parts in (2, 3):
            assert len(prove(*call, parts)) > 1


def test_ops_tagged_pointwise_are_proved() -> None:
    tagged = [target for target in pytorch_samples() if target not in TABLE]
    assert len(tagged) > 100
    for target in tagged:
        for call in pytorch_samples()[target]:
            prove(*call, 2)


@pytest.mark.parametrize("call", written_samples(), ids=lambda call: str(call.target))
def test_two_axes_at_once_are_proved(call: Call) -> None:
    assert prove_two_axes(*call, 2) >= 1
