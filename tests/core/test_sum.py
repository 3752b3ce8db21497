"""Many tensors are added up in order, whatever their dtype and strides."""

from __future__ import annotations

import pytest
import torch

from fxpar.core.sum import add_up


@pytest.mark.parametrize("num_terms", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000])
def test_floats_are_added_in_the_order_of_terms(num_terms: int, count: int) -> None:
    terms = torch.randn(num_terms, count + 7)[:, :count]
    memory = torch.full((count + 2,), torch.nan)
    add_up(terms.unbind(), memory[1:-1])
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    assert torch.equal(memory[1:-1], total)
    assert memory[[0, -1]].isnan().all(), "and nothing else is written"


def test_strides_do_not_matter() -> None:
    terms, out = torch.randn(3, 4, 10)[..., ::2], torch.empty(5, 4).mT
    add_up(terms.unbind(), out)
    torch.testing.assert_close(out, terms.sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_halves_are_added_up_as_floats_and_the_rest_as_it_is(dtype: torch.dtype) -> None:
    out = torch.empty(3, dtype=dtype)
    add_up(torch.ones(5000, 3, dtype=dtype).unbind(), out)
    assert out.eq(torch.tensor(5000, dtype=dtype)).all()


def test_a_term_of_another_shape_is_not_read_past_its_end() -> None:
    with pytest.raises(AssertionError, match=r"\[\(4,\), \(3,\)\] to a sum of shape \(4,\)"):
        add_up([torch.ones(4), torch.ones(3)], torch.empty(4))
