"""What stands where a forward keeps a tensor is quiet until it is used, and then says where and what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxpar.errors import UnavailableTensorError
from fxpar.runtime.unavailable import UnavailableTensor, with_kept

USES: list[Callable[[Any], Any]] = [
    lambda kept: kept.shape,
    lambda kept: kept.detach(),
    lambda kept: kept[0],
    lambda kept: kept + 1,
    lambda kept: 1 - kept,
    lambda kept: torch.ones(2) * kept,
    lambda kept: torch.cat([torch.ones(2), kept]),
    lambda kept: torch.mean(input=kept),
    len,
    bool,
    float,
    list,
]


@pytest.mark.parametrize("use", USES)
def test_every_use_is_an_error_that_says_where_the_tensor_is_kept(use: Callable[[Any], Any]) -> None:
    with pytest.raises(UnavailableTensorError, match=r'at File "model.py", line 3.*return the tensor from the forward'):
        use(UnavailableTensor('File "model.py", line 3'))


def test_it_can_be_copied_pickled_and_shown() -> None:
    kept = UnavailableTensor("line 3")
    for same in (kept, copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert repr(same) == "UnavailableTensor(line 3)"


def test_results_stand_between_what_is_kept_as_the_forward_returns_them() -> None:
    table = torch.arange(3)
    step = with_kept(lambda *results: results, {0: "line 1", 3: "line 2", 4: "line 3"}, lambda: {3: table})
    first, *results, third, fourth = step("a", "b")
    assert results == ["a", "b"]
    assert list(map(repr, (first, fourth))) == [f"UnavailableTensor(line {line})" for line in (1, 3)]
    assert third is table
