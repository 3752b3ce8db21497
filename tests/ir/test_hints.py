"""Hints: patterns and specs."""

from __future__ import annotations

import pytest
import torch

import fxpar.ir.markers
from fxpar.errors import HintNotFoundError, InvalidHintError
from fxpar.ir.hints import Grouped, resolve_hints

SHAPES = {"blocks.0.fc.weight": (8, 4), "blocks.1.fc.weight": (8, 4), "blocks.0.fc.bias": (8,)}
MODULES = ["blocks", "blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc"]


def test_patterns_match_across_dots_and_the_last_one_wins() -> None:
    hints = resolve_hints({"*.fc.weight": ("x", None), "blocks.1.*": (None, "x")}, SHAPES, MODULES)
    assert hints.parameters == {"blocks.0.fc.weight": ("x", None), "blocks.1.fc.weight": (None, "x")}


def test_a_suffix_hints_the_output_of_modules() -> None:
    hints = resolve_hints({"blocks.?:out": (None, "x", None)}, SHAPES, MODULES)
    assert hints.outputs == {"blocks.0": (None, "x", None), "blocks.1": (None, "x", None)}
    assert hints.parameters == {}


@pytest.mark.parametrize("pattern", ["block.*.fc.weight", "blocks.*.attn:out"])
def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion(pattern: str) -> None:
    with pytest.raises(HintNotFoundError, match=r"matches no parameter and no module output.*did you mean"):
        resolve_hints({pattern: ("x", None)}, SHAPES, MODULES)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (("q", None), "axis 'q' is none of"),
        (("data", None), "axis 'data' is none of"),
        (("x", None, None), "it has 3 entries, the tensor has 2 dims"),
        (("x", "x"), "axis 'x' is used 2 times"),
        ((Grouped(3, "x"), "x"), "axis 'x' is used 2 times"),
    ],
)
def test_a_hint_that_does_not_fit_is_an_error(spec: tuple[str | None, ...], problem: str) -> None:
    with pytest.raises(InvalidHintError, match=f"'blocks.0.fc.weight'.*{problem}"):
        resolve_hints({"blocks.0.fc.weight": spec}, SHAPES, MODULES)


def test_an_activation_hint_is_checked_and_changes_nothing() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(fxpar.ir.markers.shard(x, ("x", None)), x)
    with pytest.raises(InvalidHintError, match=r"fxpar\.shard"):
        fxpar.ir.markers.shard(x, ("x",))
