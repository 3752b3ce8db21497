"""Layers that stand in a row share their choices, and find what each would find on its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fxpar.costs.dataflow import Border, Operation, operations
from fxpar.costs.edge_prices import EdgePrices
from fxpar.ir.layout import REPLICATE, Shard
from fxpar.ir.stage import Port, PortKind
from fxpar.layouts.choose import Axis, choose
from fxpar.layouts.layer_sharing import share_layers
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.rules.rule import Strategy
from fxpar.world.mesh import Mesh
from tests.layouts.laid_out import decomposed, lay_out, pins_of, prices
from tests.support.fake_mesh import fake_mesh
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs

ROWS, COLUMNS = Shard(0, 2), Shard(1, 2)


class Deep(nn.Module):
    """Equal layers in a row."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def program_of(num_layers: int) -> list[Operation]:
    return operations(decomposed(Deep(num_layers).double(), torch.randn(16, 32, dtype=torch.double)))


def same_of(program: Sequence[Operation], strategies: Sequence[Sequence[Strategy]]) -> tuple[int, ...]:
    return share_layers(program, strategies, frozenset(), SolvedAxes(), [1] * len(program))


def weights(program: Sequence[Operation], border: Border) -> list[int]:
    ports = {op.port: number for number, op in enumerate(program) if op.is_parameter(border)}
    return [ports[Port(PortKind.PARAMETER, f"layers.{i}.weight")] for i in range(len(ports) // 2)]


@pytest.mark.parametrize("border", [Border.INPUT, Border.GRADIENT])
def test_every_other_inner_layer_is_alike(border: Border) -> None:
    program = program_of(9)
    first = same_of(program, [[Strategy((), ())]] * len(program))
    assert all(first[number] == number for number in set(first)), "the first of those that are alike is its own"
    classes = [first[number] for number in weights(program, border)]
    assert classes[3] == classes[5] and classes[2] == classes[4] == classes[6]
    assert len({classes[0], classes[2], classes[3], classes[8]}) == 4


def test_few_layers_are_each_their_own() -> None:
    program = program_of(4)
    assert same_of(program, [[Strategy((), ())]] * len(program)) == tuple(range(len(program)))


def test_a_layer_with_other_choices_is_its_own() -> None:
    program = program_of(9)
    strategies = [[Strategy((), ())]] * len(program)
    hinted = weights(program, Border.INPUT)[4]
    strategies[hinted] = [Strategy((), (ROWS,))]
    first = same_of(program, strategies)
    reader = next(n for n, op in enumerate(program) if program[hinted].values[0] in op.operands)
    assert first[hinted] == hinted and first.count(hinted) == 1
    assert first[reader] == reader and first.count(reader) == 1


@pytest.mark.parametrize("sizes", [{"x": 2}, {"y": 2, "x": 2}], ids=str)
def test_each_layer_more_costs_the_same(sizes: dict[str, int]) -> None:
    """Two layers, as the axes swap from one to the next; four are too few to share their choices."""
    models = [Deep(num_layers).double() for num_layers in (4, 6, 12)]
    joints = [decomposed(model, torch.randn(16, 32, dtype=torch.double)) for model in models]
    four, six, twelve = (lay_out(joint, pins_of(models[0], {}), prices(flops_per_us=10.0), **sizes) for joint in joints)
    for backward in (False, True):
        counts = [laid.count(backward=backward) for laid in (four, six, twelve)]
        for kind in counts[2]:
            assert counts[2][kind] - counts[0][kind] == 4 * (counts[1][kind] - counts[0][kind]), kind


def test_one_layer_among_many_follows_its_hint_and_all_ranks_compute_the_graph() -> None:
    model = Deep(9).double()
    joint = decomposed(model, torch.randn(16, 32, dtype=torch.double))
    weighed = prices(latency_us=0.01, flops_per_us=10.0)
    laid = lay_out(
        joint, pins_of(model, {"layers.4.weight": (None, None), "layers.5.weight": ("x", None)}), weighed, x=2
    )
    assert laid.parameter("layers.4.weight") == "[32, 32]"
    assert laid.parameter("layers.5.weight") == "[2@x*16, 32]"
    assert "@x" in laid.parameter("layers.2.weight") and "@x" in laid.parameter("layers.6.weight")
    inputs = inputs_of(joint, 0)
    with fake_mesh(x=2) as mesh:
        check_pieces(joint, mesh, run_local_graphs(joint, mesh, inputs), joint.module(*inputs))


class Row(nn.Module):
    """Ops in a row, all the same."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = x.sin()
        return x


def test_layers_that_cannot_share_choose_each_on_its_own() -> None:
    """Each op returns what the next one takes in turns of three."""
    program = operations(decomposed(Row(), torch.randn(64, 64), with_backward=False))
    turns = [Strategy((p,), (q,)) for p, q in ((REPLICATE, ROWS), (ROWS, COLUMNS), (COLUMNS, REPLICATE))]
    port_in, port_out = [Strategy((), (REPLICATE,))], [Strategy((p,), ()) for p in (REPLICATE, ROWS, COLUMNS)]
    strategies = [turns if op.call else port_out if op.operands else port_in for op in program]
    assert len(set(same_of(program, strategies))) < len(program)
    axis = Axis("x", 2, prices(), 1, SolvedAxes(), [1] * len(program), EdgePrices((), Mesh(x=2), prices().network))
    chosen = choose(program, strategies, axis, {value for op in program for value in op.values})
    assert chosen is not None
    assert [k for k, op in zip(chosen, program, strict=True) if op.call] == [0, 1, 2] * 4
