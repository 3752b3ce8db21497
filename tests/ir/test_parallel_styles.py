"""Parallel styles become hints for the parameters of their module."""

from __future__ import annotations

import pytest
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from fxpar.errors import UnknownStyleError
from fxpar.ir.hints import Grouped, Spec
from fxpar.ir.parallel_styles import Style, StyledParameter, hint_of_style, is_style

LINEAR, EMBEDDING, NORM = nn.Linear(8, 12), nn.Embedding(16, 8), nn.LayerNorm(8)
HALVES = Grouped(2, "x")


def hint(style: Style, module: nn.Module, shape: tuple[int, ...]) -> Spec | None:
    """The hint for a weight (or a bias, of one dim) of such a shape."""
    return hint_of_style(style, StyledParameter(module, shape), "a module")


@pytest.mark.parametrize(
    ("style", "matrix", "stack", "bias"),
    [
        ("colwise", ("x", None), (None, "x", None), ("x",)),
        ("colwise_gather_output", ("x", None), (None, "x", None), ("x",)),
        ("rowwise", (None, "x"), (None, None, "x"), (None,)),
        ("rowwise_split_input", (None, "x"), (None, None, "x"), (None,)),
        ("packed_colwise", (HALVES, None), (None, HALVES, None), (HALVES,)),
        ("packed_rowwise", (None, HALVES), (None, None, HALVES), (None,)),
        ("grouped_gemm", None, None, None),
        ("replicated_with_grad_allreduce", (None, None), (None, None, None), (None,)),
        ("mla_kv_a_proj", (None, None), (None, None, None), (None,)),
        ("moe_tp_experts", None, None, None),
    ],
)
def test_names_of_transformers(style: str, matrix: Spec, stack: Spec, bias: Spec) -> None:
    assert hint(style, LINEAR, (12, 8)) == matrix
    assert hint(style, LINEAR, (4, 12, 8)) == stack
    assert hint(style, LINEAR, (12,)) == bias


def test_embeddings() -> None:
    assert hint("embedding_rowwise", EMBEDDING, (16, 8)) == ("x", None)
    assert hint("embedding_colwise", EMBEDDING, (16, 8)) == (None, "x")
    assert hint(RowwiseParallel(), EMBEDDING, (16, 8)) == ("x", None)
    assert hint(ColwiseParallel(), EMBEDDING, (16, 8)) == (None, "x")


def test_objects_of_torch_and_those_derived_from_them() -> None:
    class OurColumns(ColwiseParallel):
        pass

    assert hint(ColwiseParallel(), LINEAR, (12, 8)) == ("x", None)
    assert hint(OurColumns(), LINEAR, (12, 8)) == ("x", None)
    assert hint(RowwiseParallel(), LINEAR, (12, 8)) == (None, "x")
    assert hint(RowwiseParallel(), LINEAR, (12,)) == (None,)
    assert hint(SequenceParallel(), NORM, (8,)) == (None,)
    assert hint(PrepareModuleInput(), LINEAR, (12, 8)) is None


def test_blocks_of_different_sizes_are_groups_of_the_largest_size_that_divides_all() -> None:
    blocks = nn.Linear(8, 96)
    blocks._tp_packed_col_blocks = [16, 16, 16, 48]  # as diffusers' models note them
    assert hint(PackedColwiseParallel(), blocks, (96, 8)) == (Grouped(6, "x"), None)
    assert hint(PackedColwiseParallel([1, 1, 1, 3, 3]), LINEAR, (72, 8)) == (Grouped(9, "x"), None)
    assert hint(PackedRowwiseParallel([1, 3]), LINEAR, (8, 16)) == (None, Grouped(4, "x"))


def test_all_styles_of_the_installed_transformers_are_known() -> None:
    for style in ALL_PARALLEL_STYLES:
        hint(style, LINEAR, (12, 8))


def test_an_unknown_style_is_an_error_that_says_where_and_what_to_do() -> None:
    with pytest.raises(UnknownStyleError, match=r"style 'colwize' for a module: .*did you mean 'colwise'.*layouts"):
        hint("colwize", LINEAR, (12, 8))
    with pytest.raises(UnknownStyleError, match=r"style 'object' for a module: expected one of 'ColwiseParallel'"):
        hint(object(), LINEAR, (12, 8))


def test_specs_are_no_styles() -> None:
    assert not any(map(is_style, [("x", None), [None, "x"], "x", (), [Grouped(3, "x"), None]]))
    assert all(map(is_style, ["colwise", ColwiseParallel()]))
