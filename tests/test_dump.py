"""Dumps: one numbered file per pass and rank, in code that a person can read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxpar.dump import Dump, format_graph
from fxpar.ir.layout import REPLICATE, Partial, Shard
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.rules.rule import Strategy
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph, stage_graph
from tests.support.placements import as_told, lay_out


class Model(nn.Module):
    """A module inside of a list, a method call, and an op with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, elementwise_affine=False)
        self.blocks = nn.ModuleList([nn.Linear(4, 6, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.blocks[0](self.norm(x))).sum()


@pytest.fixture(scope="module")
def captured_graph() -> fx.GraphModule:
    return stage_graph(Model(), (torch.randn(3, 4),), {}).module


def test_a_captured_graph_reads_like_the_model(captured_graph: fx.GraphModule) -> None:
    text = format_graph(captured_graph)
    ast.parse(text)
    assert (
        text
        == """\
def forward(
    l_x_: f32[3, 4],
    l_self_modules_blocks_modules_0_parameters_weight_: f32[6, 4],
):

    # norm
    layer_norm: f32[3, 4] = torch.nn.functional.layer_norm(l_x_, (4,), None, None, 1e-05)

    # blocks.0
    linear: f32[3, 6] = torch._C._nn.linear(layer_norm, l_self_modules_blocks_modules_0_parameters_weight_, None)

    # (no module)
    relu: f32[3, 6] = torch.nn.functional.relu(linear)
    sum_1: f32[()] = relu.sum()

    return (sum_1,)
"""
    )


class Block(nn.Module):
    """Ten ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for _ in range(8):
            h = h.sin()
        return x + h


class Stack(nn.Module):
    """Equal blocks, of which the second one's result is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = self.blocks[1](self.blocks[0](x.relu()))
        return self.blocks[2](middle).sum(), middle


def test_equal_layers_are_shown_once() -> None:
    text = format_graph(stage_graph(Stack(), (torch.randn(3, 4),), {}).module)
    ast.parse(text)
    weight = "l_self_modules_blocks_modules_{}_modules_linear_parameters_weight_"
    assert text.count(".sin()") == 8
    assert (
        f"""\
    # blocks.1: the 10 ops from h to add once more, with
    #     add for relu, {weight.format(1)} for
    #     {weight.format(0)}
    # which return
    #     middle for add

    # blocks.2: the 10 ops from h to add once more, with
    #     middle for relu, {weight.format(2)} for
    #     {weight.format(0)}
    # which return
    #     add_2 for add

    # (no module)
    sum_1: f32[()] = add_2.sum()
"""
        in text
    )


LOCAL_GRAPH = """\
# forward: 1 all_reduce over x, 4 bytes together
# backward: 1 all_gather over x, 72 bytes together
def forward(
    input_0: f32[3, 4],
    blocks_0_weight: f32[3, 4],  # of [2@x*3, 4]
    gradient_of_result_0: f32[()],
):

    # norm
    native_layer_norm: (f32[3, 4], f32[3, 1], f32[3, 1],) = aten.native_layer_norm(input_0, [4], None, None, 1e-05)
    getitem: f32[3, 4] = native_layer_norm[0]

    # blocks.0
    t: f32[4, 3] = aten.t(blocks_0_weight)  # of [4, 2@x*3]
    mm: f32[3, 3] = aten.mm(getitem, t)  # of [3, 2@x*3]

    # (no module)
    relu: f32[3, 3] = aten.relu(mm)  # of [3, 2@x*3]
    detach: f32[3, 3] = aten.detach(relu)  # of [3, 2@x*3]
    sum_1: f32[()] = aten.sum(relu)  # partial sum over x
    all_reduce: f32[()] = _c10d_functional.all_reduce(sum_1, 'sum', GROUP)  # over x, 4 bytes
    wait_tensor: f32[()] = _c10d_functional.wait_tensor(all_reduce)

    # backward of (no module)
    expand: f32[3, 6] = aten.expand(gradient_of_result_0, [3, 6])
    all_gather_into_tensor: f32[6, 3] = _c10d_functional.all_gather_into_tensor(detach, 2, GROUP)  # over x, 72 bytes
    wait_tensor_1: f32[6, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor)
    view: f32[2, 3, 1, 3] = aten.view(wait_tensor_1, [2, 3, 1, 3])
    permute: f32[3, 1, 2, 3] = aten.permute(view, [1, 2, 0, 3])
    clone: f32[3, 1, 2, 3] = aten.clone(permute, memory_format=torch.contiguous_format)
    view_1: f32[3, 6] = aten.view(clone, [3, 6])
    detach_1: f32[3, 6] = aten.detach(view_1)
    threshold_backward: f32[3, 6] = aten.threshold_backward(expand, detach_1, 0)

    # backward of blocks.0
    t_1: f32[6, 3] = aten.t(threshold_backward)
    mm_1: f32[6, 4] = aten.mm(t_1, getitem)
    t_2: f32[4, 6] = aten.t(mm_1)
    t_3: f32[6, 4] = aten.t(t_2)

    return (wait_tensor, t_3)
"""


def test_a_local_graph_shows_layouts_collectives_and_what_is_backward() -> None:
    joint = joint_graph(Model(), torch.randn(3, 4))
    rows, columns = Shard(0, 2), Shard(1, 2)
    told = {
        "blocks_0_weight": Strategy((), (rows,)),
        "t": Strategy((rows,), (columns,)),
        "mm": Strategy((REPLICATE, columns), (columns,)),
        "relu": Strategy((columns,), (columns,)),
        "detach": Strategy((columns,), (columns,)),
        "sum_1": Strategy((columns,), (Partial(),)),
    }
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, as_told(told))
        local = insert_collectives(joint, mesh)
        group = mesh.group("x").group_name
    text = format_graph(local.module)
    ast.parse(text)
    assert text.replace(f"'{group}'", "GROUP") == LOCAL_GRAPH


def test_files_are_numbered_as_passes_first_report(captured_graph: fx.GraphModule, tmp_path: Path) -> None:
    dump = Dump(tmp_path, rank=3)
    dump.graph("capture", captured_graph)
    dump.graph("split_stages", captured_graph, stage=0)
    dump.graph("trace_joint", captured_graph, stage=0)
    dump.graph("split_stages", captured_graph, stage=1)
    dump.text("schedule", "0F0 0F1\n1F0")
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert files == [
        "rank3/01_capture.py",
        "rank3/02_split_stages.stage0.py",
        "rank3/02_split_stages.stage1.py",
        "rank3/03_trace_joint.stage0.py",
        "rank3/04_schedule.txt",
    ]
    assert (tmp_path / "rank3/04_schedule.txt").read_text() == "0F0 0F1\n1F0\n"
    assert (tmp_path / "rank3/01_capture.py").read_text() == format_graph(captured_graph)


def test_a_later_compile_leaves_nothing_of_an_earlier_one_that_has_other_numbers(
    captured_graph: fx.GraphModule, tmp_path: Path
) -> None:
    earlier = Dump(tmp_path, rank=0)
    earlier.graph("capture", captured_graph)
    earlier.graph("split_backward_inputs", captured_graph, stage=0)
    earlier.graph("split_stages", captured_graph, stage=0)
    earlier.graph("split_stages", captured_graph, stage=1)
    earlier.json("costs", "{}")
    later = Dump(tmp_path, rank=0)
    later.graph("capture", captured_graph)
    later.graph("split_stages", captured_graph, stage=0)
    later.json("costs", "{}")
    assert {path.name for path in tmp_path.rglob("*.*")} == {
        "01_capture.py",
        "02_split_backward_inputs.stage0.py",  # of a pass that did not run again
        "02_split_stages.stage0.py",
        "03_costs.json",
    }


def test_without_a_directory_nothing_is_written(
    captured_graph: fx.GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dump = Dump(None, rank=0)
    dump.graph("capture", captured_graph)
    dump.text("schedule", "0F0")
    assert list(tmp_path.iterdir()) == []
