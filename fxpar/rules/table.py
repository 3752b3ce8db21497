"""The sharding rules of ATen ops. The notation is explained in `fxpar.rules.einsum`.

Pointwise ops need no row: PyTorch tags them. Most of those here are linear, and so pass partial sums on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

import fxpar.ir.ctc_loss
import fxpar.ir.markers
import fxpar.ir.random  # noqa: F401  # these define the ops of torch.ops.fxpar
from fxpar.rules import convolutions, group_norm, local_indices, local_shapes, losses, notations, views
from fxpar.rules.attention import attention, attention_without_bias_gradient
from fxpar.rules.einsum import Einsum
from fxpar.rules.einsum_rule import EinsumRule, call_as_is
from fxpar.rules.local_shapes import sized_like_result
from fxpar.rules.notations import along_dim, normalized, pointwise, reduced, reduced_whole
from fxpar.rules.random import emit_uniform
from fxpar.rules.rule import LocalOp, OpCall, Rule

aten = torch.ops.aten

EACH: Final = "each"
TOGETHER: Final = "together"
NONE: Final = "none"

POINTWISE = EinsumRule(pointwise)
"""The rule of ops with PyTorch's tag `pointwise` that have no row in the table."""


def _view(
    notation: Callable[[OpCall], Einsum | None], emit_local: Callable[[LocalOp], torch.fx.Node] = call_as_is
) -> EinsumRule:
    """An op that copies values and computes nothing: partial values of every kind pass."""
    return EinsumRule(notation, linear_in=TOGETHER, moves_only=True, emit_local=emit_local)


_reshape = _view(views.reshaped, local_shapes.emit_view)
_same = _view(pointwise)
_linear = EinsumRule(pointwise, linear_in=TOGETHER)
_multilinear = EinsumRule(pointwise, linear_in=EACH)
_along_dim = EinsumRule(along_dim)
_sized = EinsumRule(views.factory, emit_local=sized_like_result("size"))
_zeros = EinsumRule(views.factory, linear_in=NONE, emit_local=sized_like_result("size"))
_whole_reduction = EinsumRule(reduced_whole)
_arange = EinsumRule(notations.counted, emit_local=local_indices.emit_arange)
_pool = EinsumRule("... H W -> ... H W", linear_in=TOGETHER)
_pool_backward = EinsumRule("... H W, ... H W -> ... H W", linear_in=(0,))
_sized_pool = EinsumRule("... H W -> ... H W", linear_in=TOGETHER, emit_local=sized_like_result("input_size"))
_box = EinsumRule("... D H W -> ... D H W", linear_in=TOGETHER)
_box_backward = EinsumRule("... D H W, ... D H W -> ... D H W", linear_in=(0,))
_max_box = EinsumRule("... D H W -> ... D H W, ... D H W")
_max_box_backward = EinsumRule("... D H W, ... D H W, ... D H W -> ... D H W", linear_in=(0,))
_row = EinsumRule("... L -> ... L", linear_in=TOGETHER)
_row_backward = EinsumRule("... L, ... L -> ... L", linear_in=(0,))
_sized_row = EinsumRule("... L -> ... L", linear_in=TOGETHER, emit_local=sized_like_result("input_size"))

TABLE: Mapping[Callable[..., Any], Rule] = {
    # Products
    aten.mm.default: EinsumRule("m k, k n -> m n", linear_in=EACH),
    aten.bmm.default: EinsumRule("b m k, b k n -> b m n", linear_in=EACH),
    aten.mv.default: EinsumRule("m k, k -> m", linear_in=EACH),
    aten.dot.default: EinsumRule("k, k -> ()", linear_in=EACH),
    aten._cdist_forward.default: EinsumRule("... p M, ... r M -> ... p r"),
    aten._cdist_backward.default: EinsumRule("... p r, ... p M, ... r M, ... p r -> ... p M", linear_in=(0,)),
    **dict.fromkeys(
        (
            aten._linalg_det.default,
            aten._linalg_eigh.default,
            aten._linalg_slogdet.default,
            aten._linalg_svd.default,
            aten.linalg_cholesky_ex.default,
            aten.linalg_inv_ex.default,
            aten.linalg_lu.default,
            aten.linalg_lu_factor_ex.default,
            aten.linalg_matrix_exp.default,
            aten.linalg_qr.default,
            aten.lu_unpack.default,
        ),
        EinsumRule(notations.of_matrices),
    ),
    aten.linalg_solve_triangular.default: EinsumRule(notations.solved_triangular, linear_in=(1,)),
    aten._grouped_mm.default: EinsumRule(
        notations.grouped_matmul, linear_in=(0,), emit_local=local_indices.emit_dense("self", "mat2")
    ),
    aten.convolution.default: EinsumRule(convolutions.convolution, emit_local=convolutions.emit_convolution),
    aten.convolution_backward.default: EinsumRule(
        convolutions.convolution_backward, linear_in=(0,), emit_local=convolutions.emit_convolution_backward
    ),
    # Pointwise ops that are linear in all operands together, or in each
    aten.add.Tensor: _linear,
    aten.sub.Tensor: _linear,
    aten.neg.default: _linear,
    aten.mul.Tensor: _multilinear,
    aten.mul.Scalar: _multilinear,
    aten.div.Tensor: EinsumRule(pointwise, linear_in=(0,)),
    aten.div.Scalar: _multilinear,
    aten.where.self: EinsumRule(pointwise, linear_in=(1, 2)),
    aten.masked_fill.Scalar: POINTWISE,
    aten.masked_fill.Tensor: POINTWISE,
    aten.fill.Scalar: POINTWISE,
    aten.fill.Tensor: POINTWISE,
    aten.floor_divide.default: POINTWISE,
    aten.rsub.Tensor: _linear,
    aten.complex.default: POINTWISE,
    aten.bucketize.Tensor: EinsumRule("..., B -> ..."),
    aten.isin.Tensor_Tensor: EinsumRule(notations.contained),
    **dict.fromkeys(
        (
            aten.softplus_backward.default,
            aten.log_sigmoid_forward.default,
            aten.log_sigmoid_backward.default,
            aten.hardtanh_backward.default,
            aten.hardswish.default,
            aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardshrink_backward.default,
            aten.softshrink_backward.default,
            aten.leaky_relu_backward.default,
            aten.elu_backward.default,
            aten.mish_backward.default,
            aten._prelu_kernel.default,
            aten._prelu_kernel_backward.default,
        ),
        POINTWISE,  # which lack the tag
    ),
    **dict.fromkeys(losses.LOSSES_OF_ELEMENTS, EinsumRule(losses.loss_of_elements)),
    **dict.fromkeys(losses.LOSSES_OF_ELEMENTS_BACKWARD, EinsumRule(losses.loss_of_elements, linear_in=(0,))),
    # Complex numbers, as pairs of real ones and as polar coordinates
    aten.view_as_complex.default: EinsumRule("... C -> ..."),
    aten.view_as_real.default: EinsumRule("... -> ... C"),
    aten._conj.default: POINTWISE,
    aten.polar.default: POINTWISE,
    # Copies, and conversions, which round
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh_copy.default: _same,
    torch.ops.fxpar.shard.default: _same,
    torch.ops.fxpar.batch_mean.default: POINTWISE,
    aten._to_copy.default: POINTWISE,
    aten.copy.default: POINTWISE,
    # Views
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.unsqueeze.default: _view(views.reshaped),
    aten.permute.default: _view(views.permuted),
    aten.transpose.int: _view(views.transposed),
    aten.t.default: _view(views.matrix_transposed),
    aten.expand.default: _view(views.expanded, sized_like_result("size")),
    aten.repeat.default: _view(views.repeated),
    aten.diagonal.default: _view(views.diagonal),
    aten.diagonal_backward.default: EinsumRule(
        views.diagonal_restored, linear_in=TOGETHER, emit_local=sized_like_result("input_sizes")
    ),
    aten.unfold.default: _view(views.unfolded),
    aten.unfold_backward.default: EinsumRule(
        views.folded, linear_in=TOGETHER, emit_local=sized_like_result("input_sizes")
    ),
    aten.as_strided.default: EinsumRule("_ -> _", emit_local=local_shapes.emit_as_strided),
    aten.as_strided_scatter.default: EinsumRule("_, _ -> _", emit_local=local_shapes.emit_as_strided),
    # Splitting and joining tensors
    aten.select.int: _view(views.selected),
    aten.select_backward.default: EinsumRule(
        views.select_restored, linear_in=TOGETHER, emit_local=sized_like_result("input_sizes")
    ),
    aten.slice.Tensor: _view(views.sliced, local_shapes.emit_slice),
    aten.slice_backward.default: EinsumRule(
        views.slice_restored, linear_in=TOGETHER, emit_local=local_shapes.emit_slice_backward
    ),
    aten.slice_scatter.default: EinsumRule(views.slice_replaced, linear_in=TOGETHER),
    aten.select_scatter.default: EinsumRule(views.selection_replaced, linear_in=TOGETHER),
    aten.split.Tensor: _view(views.split, local_shapes.emit_split),
    aten.split_with_sizes.default: _view(views.split, local_shapes.emit_split_with_sizes),
    aten.unsafe_split.Tensor: _view(views.split, local_shapes.emit_split),
    aten.unsafe_split_with_sizes.default: _view(views.split, local_shapes.emit_split_with_sizes),
    aten.unbind.int: _view(views.unbound),
    aten.cat.default: _view(views.concatenated),
    aten.stack.default: _view(views.stacked),
    aten.constant_pad_nd.default: EinsumRule(views.padded),
    # New tensors
    aten.full.default: _sized,
    aten.zeros.default: _zeros,
    aten.ones.default: _sized,
    aten.empty.memory_format: _sized,
    aten.new_full.default: _sized,
    aten.new_zeros.default: _zeros,
    aten.new_ones.default: _sized,
    aten.new_empty.default: _sized,
    aten.new_empty_strided.default: EinsumRule(views.factory, emit_local=local_shapes.emit_strided),
    torch.ops.fxpar.ctc_losses.default: EinsumRule("T b C, b L, b, b -> b"),
    torch.ops.fxpar.ctc_losses_backward.default: EinsumRule("b, T b C, b L, b, b -> T b C", linear_in=(0,)),
    torch.ops.fxpar.uniform.default: EinsumRule(views.factory, emit_local=emit_uniform),
    aten.scalar_tensor.default: EinsumRule("-> ()"),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.full_like.default: POINTWISE,
    aten.zeros_like.default: EinsumRule(pointwise, linear_in=NONE),
    aten.ones_like.default: POINTWISE,
    aten.empty_like.default: POINTWISE,
    # Reductions that add up over ranks, and those that do not
    aten.sum.default: EinsumRule(reduced, linear_in=TOGETHER),
    aten.sum.dim_IntList: EinsumRule(reduced, linear_in=TOGETHER),
    aten.amax.default: EinsumRule(reduced, reduction="max"),
    aten.max.default: EinsumRule(reduced, reduction="max"),
    aten.amin.default: _whole_reduction,
    aten.min.default: _whole_reduction,
    aten.max.dim: _whole_reduction,
    aten.min.dim: _whole_reduction,
    aten.mean.default: _whole_reduction,
    aten.mean.dim: _whole_reduction,
    aten.argmax.default: _whole_reduction,
    aten.argmin.default: _whole_reduction,
    aten.prod.dim_int: _whole_reduction,
    aten.any.default: _whole_reduction,
    aten.any.dim: _whole_reduction,
    aten.all.default: _whole_reduction,
    aten.all.dim: _whole_reduction,
    aten.var.correction: _whole_reduction,
    aten.var_mean.correction: _whole_reduction,
    aten.std.correction: _whole_reduction,
    aten.std_mean.correction: _whole_reduction,
    aten.norm.ScalarOpt_dim: _whole_reduction,
    aten.median.default: _whole_reduction,
    aten.median.dim: _whole_reduction,
    aten.nanmedian.default: _whole_reduction,
    aten.nanmedian.dim: _whole_reduction,
    aten.mode.default: _whole_reduction,
    aten.aminmax.default: _whole_reduction,
    aten.prod.default: _whole_reduction,
    aten.nansum.default: _whole_reduction,
    aten.logsumexp.default: _whole_reduction,
    aten.linalg_vector_norm.default: _whole_reduction,
    aten.histc.default: EinsumRule(notations.counted_in_bins),
    # Ops along a dim that they need whole
    aten._softmax.default: _along_dim,
    aten._softmax_backward_data.default: _along_dim,
    aten._safe_softmax.default: _along_dim,
    aten._log_softmax.default: _along_dim,
    aten._log_softmax_backward_data.default: _along_dim,
    aten.cumsum.default: EinsumRule(along_dim, linear_in=TOGETHER),
    aten.cumprod.default: _along_dim,
    aten.logcumsumexp.default: _along_dim,
    aten.cummax.default: _along_dim,
    aten.cummin.default: _along_dim,
    aten.sort.default: _along_dim,
    aten.sort.stable: _along_dim,
    aten.topk.default: _along_dim,
    aten.glu.default: _along_dim,
    aten.glu_backward.default: _along_dim,
    aten.kthvalue.default: _whole_reduction,
    aten.linalg_cross.default: EinsumRule(along_dim, linear_in=EACH),
    aten.channel_shuffle.default: EinsumRule("n C ... -> n C ...", linear_in=TOGETHER, moves_only=True),
    aten.flip.default: _view(notations.along_dims),
    aten.roll.default: _view(notations.along_dims),
    aten._fft_r2c.default: EinsumRule(notations.transformed),
    aten._fft_c2r.default: EinsumRule(notations.transformed),
    aten._fft_c2c.default: EinsumRule(notations.transformed),
    aten.tril.default: EinsumRule("... I J -> ... I J", linear_in=TOGETHER),
    aten.triu.default: EinsumRule("... I J -> ... I J", linear_in=TOGETHER),
    # Windows of images as columns
    aten.im2col.default: EinsumRule("n C H W -> n K L", linear_in=TOGETHER),
    aten.col2im.default: EinsumRule("n K L -> n C H W", linear_in=TOGETHER),
    # Images of another size: the dims that are sampled are whole
    aten.upsample_nearest1d.default: _row,
    aten.upsample_nearest1d_backward.default: _sized_row,
    aten.upsample_nearest2d.default: _pool,
    aten.upsample_nearest2d_backward.default: _sized_pool,
    aten.upsample_bilinear2d.default: _pool,
    aten.upsample_bilinear2d_backward.default: _sized_pool,
    aten.upsample_bicubic2d.default: _pool,
    aten.upsample_bicubic2d_backward.default: _sized_pool,
    aten._upsample_bilinear2d_aa.default: _pool,
    aten._upsample_bilinear2d_aa_backward.default: _sized_pool,
    aten._upsample_bicubic2d_aa.default: _pool,
    aten._upsample_bicubic2d_aa_backward.default: _sized_pool,
    aten.reflection_pad1d.default: _row,
    aten.reflection_pad1d_backward.default: _row_backward,
    aten.reflection_pad2d.default: _pool,
    aten.reflection_pad2d_backward.default: _pool_backward,
    aten.replication_pad1d.default: _row,
    aten.replication_pad1d_backward.default: _row_backward,
    aten.replication_pad2d.default: _pool,
    aten.replication_pad2d_backward.default: _pool_backward,
    aten.reflection_pad3d.default: _box,
    aten.reflection_pad3d_backward.default: _box_backward,
    aten.replication_pad3d.default: _box,
    aten.replication_pad3d_backward.default: _box_backward,
    aten.grid_sampler_2d.default: EinsumRule("n c H W, n P Q D -> n c P Q", linear_in=(0,)),
    aten.grid_sampler_2d_backward.default: EinsumRule("n c P Q, n c H W, n P Q D -> n c H W, n P Q D"),
    aten.grid_sampler_3d.default: EinsumRule("n c D H W, n P Q R E -> n c P Q R", linear_in=(0,)),
    aten.grid_sampler_3d_backward.default: EinsumRule("n c P Q R, n c D H W, n P Q R E -> n c D H W, n P Q R E"),
    # Pools: the dims that a window moves over are whole
    aten.avg_pool2d.default: _pool,
    aten.avg_pool2d_backward.default: _pool_backward,
    aten.avg_pool3d.default: EinsumRule("... D H W -> ... D H W", linear_in=TOGETHER),
    aten.avg_pool3d_backward.default: EinsumRule("... D H W, ... D H W -> ... D H W", linear_in=(0,)),
    aten._adaptive_avg_pool2d.default: _pool,
    aten._adaptive_avg_pool2d_backward.default: _pool_backward,
    aten._adaptive_avg_pool3d.default: EinsumRule("... D H W -> ... D H W", linear_in=TOGETHER),
    aten.adaptive_max_pool2d.default: EinsumRule("... H W -> ... H W, ... H W"),
    aten.adaptive_max_pool2d_backward.default: EinsumRule("... H W, ... H W, ... H W -> ... H W", linear_in=(0,)),
    aten.adaptive_max_pool3d.default: _max_box,
    aten.adaptive_max_pool3d_backward.default: EinsumRule(
        "... D H W, ... D H W, ... D H W -> ... D H W",
        linear_in=(0,),
        emit_local=local_indices.emit_dense("indices"),  # which it reads on CPUs as if they were contiguous
    ),
    aten._adaptive_avg_pool3d_backward.default: _box_backward,
    aten.max_pool3d_with_indices.default: _max_box,
    aten.max_pool3d_with_indices_backward.default: _max_box_backward,
    aten.max_pool2d_with_indices.default: EinsumRule("... H W -> ... H W, ... H W"),
    aten.max_pool2d_with_indices_backward.default: EinsumRule("... H W, ... H W, ... H W -> ... H W", linear_in=(0,)),
    # Norms: rows may be sharded, normalised dims are whole
    aten.native_layer_norm.default: EinsumRule(normalized("... {H}, {H}, {H} -> ... {H}, ... {1}, ... {1}")),
    aten.native_layer_norm_backward.default: EinsumRule(
        normalized("... {H}, ... {H}, ... {1}, ... {1}, {H}, {H} -> ... {H}, {H}, {H}"),
        emit_local=local_indices.emit_dense("mean", "rstd"),  # which it reads on CPUs as if they were contiguous
    ),
    aten._fused_rms_norm.default: EinsumRule(normalized("... {H}, {H} -> ... {H}, ... {1}")),
    aten._fused_rms_norm_backward.default: EinsumRule(normalized("... {H}, ... {H}, ... {1}, {H} -> ... {H}, {H}")),
    aten.native_group_norm.default: EinsumRule(group_norm.group_norm, emit_local=group_norm.emit_group_norm),
    aten.native_group_norm_backward.default: EinsumRule(
        group_norm.group_norm_backward, emit_local=group_norm.emit_group_norm_backward
    ),
    aten._native_batch_norm_legit_functional.default: EinsumRule(
        notations.of_channels("{x}, c, c, c, c -> {x}, {s}, {s}, c, c")
    ),
    aten._native_batch_norm_legit.no_stats: EinsumRule(notations.of_channels("{x}, c, c -> {x}, {s}, {s}")),
    aten._native_batch_norm_legit_no_training.default: EinsumRule("n c ..., c, c, c, c -> n c ..., _, _"),
    aten.native_batch_norm_backward.default: EinsumRule(
        notations.of_channels("{x}, {x}, c, c, c, {s}, {s} -> {x}, c, c")
    ),
    # Lookups
    aten.embedding.default: EinsumRule("v d, ... -> ... d", linear_in=(0,), emit_local=local_indices.emit_embedding),
    aten.embedding_dense_backward.default: EinsumRule(
        notations.embedding_backward, linear_in=(0,), emit_local=local_indices.emit_embedding_backward
    ),
    aten.index.Tensor: EinsumRule(notations.indexed),
    aten._unsafe_index.Tensor: EinsumRule(notations.indexed),
    aten.index_put.default: EinsumRule(notations.index_put, linear_in=(0, -1)),
    aten._unsafe_index_put.default: EinsumRule(notations.index_put, linear_in=(0, -1)),
    aten.index_select.default: EinsumRule(notations.index_selected, linear_in=(0,)),
    aten.gather.default: EinsumRule(notations.gathered, linear_in=(0,)),
    aten.scatter.src: EinsumRule(notations.scattered),
    aten.scatter.value: EinsumRule(notations.scattered),
    aten.scatter_add.default: EinsumRule(notations.scattered),
    aten.scatter_reduce.two: EinsumRule(notations.scattered),
    aten.index_add.default: EinsumRule(notations.index_added, linear_in=(0, 2)),
    aten.index_copy.default: EinsumRule(notations.index_added, linear_in=(0, 2)),
    # Attention, on CPUs and on GPUs
    aten._scaled_dot_product_flash_attention_for_cpu.default: EinsumRule(
        attention("{q}, {kv}, {kv}, {mask} -> {q}, {rows}")
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: EinsumRule(
        attention("{q}, {q}, {kv}, {kv}, {q}, {rows}, {mask} -> {q}, {kv}, {kv}")
    ),
    aten._scaled_dot_product_flash_attention.default: EinsumRule(
        attention("{q}, {kv}, {kv} -> {q}, {rows}, _, _, _, _, _, _, _")
    ),
    aten._scaled_dot_product_flash_attention_backward.default: EinsumRule(
        attention("{q}, {q}, {kv}, {kv}, {q}, {rows}, _, _, _, _ -> {q}, {kv}, {kv}")
    ),
    aten._scaled_dot_product_efficient_attention.default: EinsumRule(
        attention("{q}, {kv}, {kv}, {mask} -> {q}, {rows}, _, _", queries="S")  # pads the rows
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: EinsumRule(
        attention_without_bias_gradient("{q}, {q}, {kv}, {kv}, {mask}, {q}, {rows}, _, _ -> {q}, {kv}, {kv}, _")
    ),
    aten._scaled_dot_product_cudnn_attention.default: EinsumRule(
        attention("{q}, {kv}, {kv}, {mask} -> {q}, {rows} 1, _, _, _, _, _, _, _")
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: EinsumRule(
        attention("{q}, {q}, {kv}, {kv}, {q}, {rows} 1, _, _, {mask}, _, _ -> {q}, {kv}, {kv}")
    ),
}

LIBRARY_OPS: Mapping[str, Rule] = {
    # What transformers' experts call where `_grouped_mm` does not compile: rows in groups, as there.
    "transformers::grouped_mm_fallback": EinsumRule("S k, G k n, G -> S n", linear_in=(0,)),
    "transformers::grouped_mm_fallback_backward": EinsumRule("S k, G k n, G, S n -> S k, G k n", linear_in=(3,)),
}
"""Ops of libraries that models use, by their names, since they exist only once these are imported."""
