"""The checker between passes accepts what passes make, and finds each kind of thing that a pass can break."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxpar.graph.graph_writer import fake_mode_of
from fxpar.graph.invariants import BrokenInvariantError, Form, check_collectives_kept, check_graph
from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import communication, known_placed, set_placed, set_value, tensor
from fxpar.pass_log import PassLog
from fxpar.passes.insert_collectives import insert_collectives
from tests.support.fake_mesh import fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.placements import at_random, lay_out

aten = torch.ops.aten


class Net(nn.Module):
    """Matmuls, a norm, and an op of several results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.down(torch.cat([left.relu(), right], dim=-1)).sum()


@dataclass(frozen=True)
class Graphs:
    """The same program before and after collectives are inserted, and the place of the rank that runs the latter."""

    laid_out: fx.GraphModule
    local: fx.GraphModule
    coordinate: Mapping[str, int]


@pytest.fixture(scope="module")
def graphs() -> Iterator[Graphs]:
    with fake_mesh(x=2) as mesh:
        joint = joint_graph(Net(), torch.randn(4, 8))
        lay_out(joint, mesh, at_random(seed=7))
        yield Graphs(joint.module, insert_collectives(joint, mesh).module, mesh.coordinate)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes may be spoiled."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def one_of(nodes: Sequence[fx.Node], draw: st.DataObject) -> fx.Node:
    return draw.draw(st.sampled_from(nodes))


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def calls_of_tensors(module: fx.GraphModule) -> list[fx.Node]:
    """Those of ops that return one tensor of several elements along each of two dims or more."""
    values = [(node, node.meta["val"]) for node in calls(module)]
    return [node for node, value in values if isinstance(value, Tensor) and value.dim() > 1 and min(value.shape) > 1]


def starts(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if communication(node) is not None]


def spoil_value(module: fx.GraphModule, like: Callable[[Tensor], Tensor], draw: st.DataObject) -> fx.Node:
    """Note another value than the op returns."""
    node = one_of(calls_of_tensors(module), draw)
    with fake_mode_of(module.graph):
        set_value(node, like(tensor(node)))
    return node


def lose_the_value(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    node = one_of(calls_of_tensors(module), draw)
    del node.meta["val"]
    return node, "has no value"


def note_a_real_value(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    node = one_of(calls_of_tensors(module), draw)
    set_value(node, torch.ones(2, 2))
    return node, "has a Tensor for a value, not a FakeTensor"


def note_another_dtype(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    return spoil_value(module, lambda value: value.to(torch.float16), draw), "but returns"


def note_other_strides(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    def with_gaps(value: Tensor) -> Tensor:
        strides = [stride * 2 + 1 for stride in value.stride()]
        return torch.empty_strided(value.shape, strides, dtype=value.dtype)

    return spoil_value(module, with_gaps, draw), "but returns"


def note_another_shape(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    return spoil_value(module, lambda value: value.new_empty(3, 5, 7), draw), "but returns"


def compute_for_nobody(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    before = one_of([node for node in calls_of_tensors(module) if communication(node) is None], draw)
    with module.graph.inserting_after(before), fake_mode_of(module.graph):
        node = module.graph.call_function(aten.relu.default, (before,))
        set_value(node, aten.relu.default(tensor(before)))
    return node, "has no users"


def skip_a_wait(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    node = one_of(starts(module), draw)
    (wait,) = node.users
    wait.replace_all_uses_with(node)
    module.graph.erase_node(wait)
    return node, "before it is waited for"


def forget_what_is_communicated(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    node = one_of(starts(module), draw)
    del node.meta["fxpar_communication"]
    return node, "is a collective without a recorded `Communication`"


def give_another_layout(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    laid_out = [node for node in calls_of_tensors(module) if known_placed(node) is not None]
    node = one_of(laid_out, draw)
    placed = known_placed(node)
    assert placed is not None
    set_placed(node, replace(placed, outputs=(Layout((3, 5, 7)),)))
    return node, "but the layout [3, 5, 7]"


def lose_the_layouts(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    node = one_of([node for node in calls_of_tensors(module) if node.target is not operator.getitem], draw)
    del node.meta["fxpar_placed"]
    return node, "has no layouts"


def give_operands_other_layouts(module: fx.GraphModule, draw: st.DataObject) -> tuple[fx.Node, str]:
    node = one_of([node for node in calls_of_tensors(module) if node.target is not operator.getitem], draw)
    placed = known_placed(node)
    assert placed is not None
    set_placed(node, replace(placed, inputs=(*placed.inputs, Layout((1,)))))
    return node, "has operands of shapes"


Spoil = Callable[[fx.GraphModule, st.DataObject], tuple[fx.Node, str]]

OF_ANY: list[Spoil] = [
    lose_the_value,
    note_a_real_value,
    note_another_dtype,
    note_other_strides,
    note_another_shape,
    compute_for_nobody,
]
OF_LOCAL: list[Spoil] = [*OF_ANY, skip_a_wait, forget_what_is_communicated, give_another_layout]
OF_LAID_OUT: list[Spoil] = [*OF_ANY, give_another_layout, lose_the_layouts, give_operands_other_layouts]


def test_what_passes_make_is_accepted(graphs: Graphs) -> None:
    check_graph(graphs.laid_out, Form.LOGICAL, "")
    check_graph(graphs.laid_out, Form.LAID_OUT, "")
    check_graph(graphs.local, Form.LOCAL, "", graphs.coordinate)
    check_collectives_kept([graphs.local], [copied(graphs.local)], "")
    assert len(starts(graphs.local)) > 2, "nothing of collectives is tested"


@pytest.mark.parametrize("spoil", OF_LOCAL, ids=lambda spoil: spoil.__name__)
@settings(max_examples=30)
@given(draw=st.data())
def test_a_broken_local_graph_is_found(graphs: Graphs, spoil: Spoil, draw: st.DataObject) -> None:
    found(graphs.local, Form.LOCAL, spoil, draw, graphs.coordinate)


@pytest.mark.parametrize("spoil", OF_LAID_OUT, ids=lambda spoil: spoil.__name__)
@settings(max_examples=30)
@given(draw=st.data())
def test_a_broken_laid_out_graph_is_found(graphs: Graphs, spoil: Spoil, draw: st.DataObject) -> None:
    found(graphs.laid_out, Form.LAID_OUT, spoil, draw)


def found(
    module: fx.GraphModule, form: Form, spoil: Spoil, draw: st.DataObject, coordinate: Mapping[str, int] | None = None
) -> None:
    """The error names the pass, the node, and what is wrong."""
    spoiled = copied(module)
    node, problem = spoil(spoiled, draw)
    with pytest.raises(BrokenInvariantError) as raised:
        check_graph(spoiled, form, "after the pass rewrite", coordinate)
    assert str(raised.value).startswith(f"after the pass rewrite: {node} (")
    assert problem in str(raised.value)


def test_an_operand_that_is_computed_too_late_is_found(graphs: Graphs) -> None:
    spoiled = copied(graphs.local)
    first, *_, last = calls(spoiled)
    last.append(first)
    with pytest.raises(BrokenInvariantError, match="used before it has been defined"):
        check_graph(spoiled, Form.LOCAL, "after the pass rewrite")


@settings(max_examples=30)
@given(draw=st.data())
def test_lost_and_added_collectives_are_found(graphs: Graphs, draw: st.DataObject) -> None:
    fewer = copied(graphs.local)
    lost = one_of(starts(fewer), draw)
    done = communication(lost)
    (wait,) = lost.users
    wait.replace_all_uses_with(lost.all_input_nodes[0])
    fewer.graph.erase_node(wait)
    fewer.graph.erase_node(lost)
    with pytest.raises(BrokenInvariantError, match=f"lost collectives: 1 {done}"):
        check_collectives_kept([graphs.local], [fewer], "after the pass rewrite")
    with pytest.raises(BrokenInvariantError, match=f"added collectives: 1 {done}"):
        check_collectives_kept([fewer], [graphs.local], "after the pass rewrite")
    check_collectives_kept([graphs.local], [graphs.local, fewer], "", may_repeat=True)


def test_only_where_it_is_asked_for(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = copied(graphs.local)
    del calls(broken)[0].meta["val"]
    monkeypatch.setenv("FXPAR_CHECK", "0")
    PassLog().graph("rewrite", broken, Form.LOCAL, 3)
    monkeypatch.setenv("FXPAR_CHECK", "1")
    with pytest.raises(BrokenInvariantError, match="after the pass rewrite, in stage 3: "):
        PassLog().graph("rewrite", broken, Form.LOCAL, 3)
    PassLog().graph("rewrite", broken, None, 3)
