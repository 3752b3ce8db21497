"""The first half computes the gradients of edges and nothing that can wait; the second one computes the rest."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from fxpar.dump import format_graph
from fxpar.graph.extract import returned
from fxpar.ir.stage import PortKind
from fxpar.passes.partition import partition
from tests.passes.backward_halves import Chain, check_bits, count, gpt, linears, work
from tests.support.halves import decomposed, joints_of, split

aten = torch.ops.aten
CONVOLUTION = aten.convolution_backward.default


def test_nothing_but_views_runs_twice_and_nothing_is_lost() -> None:
    for joint in joints_of(*gpt()):
        parts, halves = split(joint)
        assert parts.backward is not None
        inputs, weights = work(halves.inputs), work(halves.weights)
        assert not inputs & weights
        assert not (inputs | weights) & work(parts.forward)
        assert inputs | weights == work(parts.backward)


def test_a_linear_layer_has_one_product_in_each_half() -> None:
    _, second = joints_of(linears(), (torch.randn(5, 6),), ["1"])
    halves = check_bits(second)
    assert [count(half, aten.mm.default) for half in (halves.inputs, halves.weights)] == [3, 3]
    assert count(halves.inputs, aten.sum.dim_IntList) == 0, "gradients of biases can wait"


def test_all_edges_get_their_gradients_from_the_first_half() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(torch.relu(a))
            return (self.c(torch.relu(b)) * a).sum()

    joints = joints_of(Skip(), (torch.randn(5, 6),), ["b", "c"])
    halves = [check_bits(joint) for joint in joints]
    edges = [sum(port.kind is PortKind.EDGE for port in joint.gradients) for joint in joints]
    assert edges == [0, 1, 2]
    given = [len(returned(half.inputs)) for half in halves]
    assert given == [number + half.num_carried for number, half in zip(edges, halves, strict=True)]


def test_the_gradient_of_a_tied_weight_is_summed_in_the_second_half() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.up(torch.relu(self.up(self.first(x))))).sum()

    _, second = joints_of(Tied(), (torch.randn(5, 6),), ["up"])
    halves = check_bits(second)
    assert (count(halves.inputs, aten.add.Tensor), count(halves.weights, aten.add.Tensor)) == (0, 1)


class Convolutions(nn.Module):
    """Residual blocks of a U-shaped network."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.down:
            x = x + torch.relu(self.norm(convolution(x)))
        return self.up(x).mean()


def test_the_gradients_of_a_convolution_are_computed_apart() -> None:
    for joint in joints_of(Convolutions(), (torch.randn(2, 4, 8, 8),), ["down.1"]):
        halves = check_bits(decomposed(joint))
    masks = [
        Counter(tuple(node.args[10]) for node in half.graph.find_nodes(op="call_function", target=CONVOLUTION))
        for half in (halves.inputs, halves.weights)
    ]
    assert masks[0] == {(True, False, False): 3}
    assert masks[1] == {(False, True, False): 3}


def test_the_whole_backward_is_left_as_it_was() -> None:
    _, joint = joints_of(Convolutions(), (torch.randn(2, 4, 8, 8),), ["down.1"])
    parts, _ = split(joint)
    whole = partition(joint)
    assert parts.backward is not None
    assert whole.backward is not None
    assert format_graph(parts.backward) == format_graph(whole.backward)


WHOLE_BACKWARD = """\
def forward(
    linear: f32[5, 4],
    _1_weight: f32[2, 4],
    relu: f32[5, 2],
    gradient_of_result_0: f32[()],
):

    # backward of (no module)
    expand: f32[5, 2] = aten.expand(gradient_of_result_0, [5, 2])

    # 2
    detach: f32[5, 2] = aten.detach(relu)

    # backward of 2
    detach_1: f32[5, 2] = aten.detach(detach)
    threshold_backward: f32[5, 2] = aten.threshold_backward(expand, detach_1, 0)

    # 1
    t: f32[4, 2] = aten.t(_1_weight)

    # backward of 1
    t_1: f32[2, 4] = aten.t(t)
    mm: f32[5, 4] = aten.mm(threshold_backward, t_1)
    t_2: f32[2, 5] = aten.t(threshold_backward)
    mm_1: f32[2, 4] = aten.mm(t_2, linear)
    t_3: f32[4, 2] = aten.t(mm_1)
    sum_2: f32[1, 2] = aten.sum.dim_IntList(threshold_backward, [0], True)
    view: f32[2] = aten.view(sum_2, [2])
    t_4: f32[2, 4] = aten.t(t_3)

    return (mm, t_4, view)
"""

FIRST_HALF = """\
def forward(
    _1_weight: f32[2, 4],
    relu: f32[5, 2],
    gradient_of_result_0: f32[()],
):

    # backward of (no module)
    expand: f32[5, 2] = aten.expand(gradient_of_result_0, [5, 2])

    # 2
    detach: f32[5, 2] = aten.detach(relu)

    # backward of 2
    detach_1: f32[5, 2] = aten.detach(detach)
    threshold_backward: f32[5, 2] = aten.threshold_backward(expand, detach_1, 0)

    # 1
    t: f32[4, 2] = aten.t(_1_weight)

    # backward of 1
    t_1: f32[2, 4] = aten.t(t)
    mm: f32[5, 4] = aten.mm(threshold_backward, t_1)

    return (mm, threshold_backward)
"""

SECOND_HALF = """\
def forward(
    linear: f32[5, 4],
    threshold_backward: f32[5, 2],
):

    # backward of 1
    t_2: f32[2, 5] = aten.t(threshold_backward)
    mm_1: f32[2, 4] = aten.mm(t_2, linear)
    t_3: f32[4, 2] = aten.t(mm_1)
    sum_2: f32[1, 2] = aten.sum.dim_IntList(threshold_backward, [0], True)
    view: f32[2] = aten.view(sum_2, [2])
    t_4: f32[2, 4] = aten.t(t_3)

    return (t_4, view)
"""


def test_before_and_after() -> None:
    _, second = joints_of(Chain(nn.Linear(3, 4), nn.Linear(4, 2), nn.ReLU()), (torch.randn(5, 3),), ["1"])
    parts, halves = split(second)
    assert parts.backward is not None
    assert format_graph(parts.backward) == WHOLE_BACKWARD
    assert format_graph(halves.inputs) == FIRST_HALF
    assert format_graph(halves.weights) == SECOND_HALF
    assert (halves.inputs_saved, halves.weights_saved, halves.num_carried) == ((1, 2), (0,), 1)
