"""A U-Net's channels shard as the hidden dims of a transformer do: one reduction for each residual block and pass."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.ir import node_meta
from fxpar.ir.stage import JointGraph
from fxpar.layouts.pins import Pins
from fxpar.passes.decompose.norm_policy import NormPolicy
from fxpar.rules import rule_for
from tests.layouts.laid_out import LaidOut, decomposed, lay_out, pins_of, prices
from tests.support.fake_mesh import fake_mesh
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs
from tests.support.parity import SUBJECTS

aten = torch.ops.aten
SUBJECT = SUBJECTS["unet"]
BLOCKS = {"down_blocks.0": 1, "down_blocks.1": 1, "mid_block": 2, "up_blocks.0": 2, "up_blocks.1": 2}
ATTENTIONS = {"down_blocks.1": 1, "mid_block": 1, "up_blocks.0": 2}


@cache
def unet() -> tuple[JointGraph, Pins]:
    """The joint graph with its hints, for a batch that ranks cannot share."""
    torch.manual_seed(0)
    model = SUBJECT.build(1).double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in SUBJECT.make_batch(3).items()}
    return decomposed(model, **batch), pins_of(model, SUBJECT.hints)


@cache
def over_two_ranks() -> LaidOut:
    return lay_out(*unet(), prices(latency_us=1.0, flops_per_us=1e5), x=2)


def test_every_op_has_a_rule() -> None:
    joint, _ = unet()
    targets = {node.target for node in joint.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert {target for target in targets if rule_for(target) is None} == set()


def test_each_residual_block_and_each_attention_is_reduced_once_in_the_forward() -> None:
    """The convolution of the upsampled image, which no hint names, may be one more."""
    reduced = Counter(
        node_meta.module_path(c.node).removeprefix("unet.").split(".resnets")[0].split(".attentions")[0]
        for c in over_two_ranks().collectives
        if not node_meta.is_backward(c.node) and c.kind in ("all_reduce", "reduce_scatter")
    )
    found = {block: count for block, count in reduced.items() if block in BLOCKS}
    extra = sum(found.values()) - sum(BLOCKS.values()) - sum(ATTENTIONS.values())
    assert all(found[block] >= BLOCKS[block] + ATTENTIONS.get(block, 0) for block in BLOCKS), reduced
    assert extra in (0, 1), reduced


def test_convolutions_between_the_first_and_the_last_share_their_work() -> None:
    over_two_ranks()
    joint, _ = unet()
    whole = [
        node_meta.module_path(node)
        for node in joint.module.graph.find_nodes(op="call_function", target=aten.convolution.default)
        if not any(layout.axes for layout in node_meta.placed(node).inputs)
    ]
    assert set(whole) <= {"unet.conv_in", "unet.conv_out", "unet.down_blocks.0.downsamplers.0.conv"}


def check_numbers(joint: JointGraph, **sizes: int) -> None:
    """The laid-out graphs of all ranks together give what the joint graph returns."""
    inputs = inputs_of(joint, 0)
    with fake_mesh(**sizes) as mesh:
        check_pieces(joint, mesh, run_local_graphs(joint, mesh, inputs), joint.module(*inputs))


def test_all_ranks_together_compute_the_joint_graph() -> None:
    check_numbers(over_two_ranks().joint, x=2)


class LittleUNet(nn.Module):
    """One level down and up again; a skip connection of other width than what comes from below."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.up, self.leave = nn.GroupNorm(2, 24), nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skip = self.enter(image)
        below = functional.silu(self.down(skip))
        joined = torch.cat([functional.interpolate(below, scale_factor=2.0), skip], 1)
        return self.leave(self.up(functional.silu(self.norm(joined)))).square().mean()


@pytest.mark.parametrize("sizes", [{"x": 4}, {"y": 2, "x": 2}], ids=str)
def test_few_groups_and_unequal_widths_are_right_on_every_rank(sizes: dict[str, int]) -> None:
    """Work is so expensive that it is shared wherever it can be; two groups are normalised by four ranks."""
    torch.manual_seed(0)
    joint = decomposed(LittleUNet().double(), torch.randn(3, 1, 4, 4).double(), norm_policy=NormPolicy(4))
    laid = lay_out(joint, Pins(), prices(latency_us=0.01, flops_per_us=10.0), **sizes)
    assert {c.axis for c in laid.collectives} == sizes.keys()
    check_numbers(joint, **sizes)


class Upsampled(nn.Module):
    """An image that is enlarged between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.up, self.down = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        small = functional.silu(self.enter(image))
        return self.down(functional.silu(self.up(functional.interpolate(small, scale_factor=2.0)))).square().mean()


def test_the_gradient_of_an_enlarged_image_is_reduced_when_it_is_small_again() -> None:
    model = Upsampled()
    channels = {"up.weight": ("x", None, None, None), "down.weight": (None, "x", None, None)}
    image = torch.randn(3, 8, 8, 8)
    laid = lay_out(decomposed(model, image), pins_of(model, channels), prices(latency_us=0.1), x=2)
    assert {c.num_bytes for c in laid.collectives if node_meta.is_backward(c.node)} == {image.nbytes}
