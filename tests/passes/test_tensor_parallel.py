"""Two-dimensional tensor parallelism, found by cost: the collectives of layers are those of the paper's equations.

Singh et al.: a layer of m x k by k x n reduces its result along y (Eq. 6) and its input's gradient along x (Eq. 7);
in every second layer x and y change places.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fxpar.ir.hints import Spec
from fxpar.layouts.pins import Pins
from tests.layouts.laid_out import decomposed, lay_out, pins_of
from tests.passes.layouts_on_a_plane import Chain, by_equations, collectives_count, sent
from tests.support.fake_mesh import fake_mesh
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs


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


def test_a_hint_for_x_leaves_y_to_be_chosen() -> None:
    model = Chain((48, 96, 48))
    joint = decomposed(model, torch.randn(512, 48))
    hints: dict[str, Spec] = {"layers.0.weight": (None, "x"), "layers.1.weight": (None, None)}
    laid = lay_out(joint, pins_of(model, hints), collectives_count(), y=2, x=2)
    assert laid.parameter("layers.0.weight") == "[2@y*48, 2@x*24]"
    assert laid.parameter("layers.1.weight") == "[48, 96]", "a hint that names no axis asks for the whole"


@pytest.mark.parametrize("sizes", [{"y": 2, "x": 2}, {"y": 2, "x": 3}], ids=str)
def test_all_ranks_of_a_plane_compute_the_joint_graph(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    joint = decomposed(Chain((12, 24, 18, 12)).double(), torch.randn(10, 12, dtype=torch.double))
    lay_out(joint, Pins(), collectives_count(), **sizes)
    inputs = inputs_of(joint, 0)
    with fake_mesh(**sizes) as mesh:
        found = run_local_graphs(joint, mesh, inputs)
    check_pieces(joint, mesh, found, joint.module(*inputs))
