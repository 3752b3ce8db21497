"""distribute: what it does to a model, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar.distribute_model import distribute
from fxpar.errors import (
    AlreadyDistributedError,
    HintNotFoundError,
    InvalidHintError,
    InvalidOptionError,
    InvalidScheduleError,
    InvalidStagesError,
    NotCompiledError,
    StageNotFoundError,
    UnknownScheduleError,
)
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.plan import Plan, PlannedParameter
from fxpar.ir.random import random_state
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import distribution_of, own_seed
from fxpar.schedule import build_schedule, write_csv
from tests.support.fake_mesh import fake_mesh


class Net(nn.Module):
    """Two blocks and a head tied to the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 16)
        self.head.weight = self.blocks[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


HINTS = {"blocks.*.0.weight": ("x", None), "blocks.*.2.weight": (None, "x")}
EXAMPLE = (torch.zeros(4, 8, device="meta"),)


@pytest.mark.parametrize("example_inputs", [None, EXAMPLE])
def test_a_rank_keeps_only_the_pieces_of_its_stage(example_inputs: Any) -> None:
    original = dict(Net().named_parameters())
    with fake_mesh(pipe=2, x=2) as mesh:
        model = distribute(Net(), mesh, stages=["blocks.1"], layouts=HINTS, example_inputs=example_inputs)
        held = dict(model.named_parameters())
        assert set(held) == {name for name in original if name.startswith("blocks.0")}
        assert set(model.state_dict()) == set(held) | {"head.weight"}, "a tied weight has all its names"
        for name, parameter in held.items():
            assert isinstance(parameter, DTensor)
            assert parameter.shape == original[name].shape
        assert held["blocks.0.0.weight"].to_local().shape == (8, 8)
        assert held["blocks.0.2.weight"].to_local().shape == (8, 8)


def test_example_inputs_find_the_layout_of_biases_and_modules_alone_do_not() -> None:
    with fake_mesh(x=2) as mesh:
        model = distribute(Net(), mesh, layouts=HINTS, example_inputs=EXAMPLE)
        assert dict(model.named_parameters())["blocks.0.0.bias"].to_local().shape == (8,)
        with pytest.warns(UserWarning, match=r"without `example_inputs`, \d+ parameters.* MB\) stay whole"):
            model = distribute(Net(), mesh, layouts=HINTS)
        assert dict(model.named_parameters())["blocks.0.0.bias"].to_local().shape == (16,)


def test_a_count_of_stages_is_balanced() -> None:
    with fake_mesh(pipe=2) as mesh:
        model = distribute(Net(), mesh, stages=2, example_inputs=EXAMPLE)
        assert {name.partition(".2")[0] for name, _ in model.named_parameters()} <= {
            "blocks.0.0.weight",
            "blocks.0.0.bias",
            "blocks.0",
        }


def test_a_plan_saves_loads_and_serves_again(tmp_path: Path) -> None:
    plan = Plan(
        stages=("blocks.1",),
        mesh={"pipe": 2, "data": 1, "z": 1, "y": 1, "x": 2},
        microbatches=4,
        schedule="1f1b",
        parameters={"head.bias": PlannedParameter(1, Layout((16,), (("x", Shard(0, 2)),)))},
        placement=(0, 1),
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_meta_model_is_initialised_piece_by_piece_with_the_same_numbers_on_every_mesh() -> None:
    pieces = {}
    for sizes in ({"x": 1}, {"x": 2}, {"data": 2}):
        with torch.device("meta"):
            model = Net()
        with fake_mesh(**sizes) as mesh:
            torch.manual_seed(3)
            distribute(model, mesh, layouts=HINTS)
            pieces[str(sizes)] = {name: p.to_local().detach() for name, p in model.named_parameters()}
    whole, half, replica = pieces.values()
    for name in whole:
        torch.testing.assert_close(replica[name], whole[name], rtol=0, atol=0)
    torch.testing.assert_close(half["blocks.0.0.weight"], whole["blocks.0.0.weight"][:8], rtol=0, atol=0)
    torch.testing.assert_close(half["blocks.0.2.weight"], whole["blocks.0.2.weight"][:, :8], rtol=0, atol=0)
    assert whole["blocks.0.0.weight"].abs().max() <= 8**-0.5
    assert whole["blocks.0.0.weight"].std() > 0.1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stages": ["block.1"]}, StageNotFoundError, "'block.1' names no module.*did you mean 'blocks.1'"),
        ({"stages": ["block.1"], "example_inputs": EXAMPLE}, StageNotFoundError, "did you mean 'blocks.1'"),
        (
            {"stages": ["blocks.1", "head"]},
            InvalidStagesError,
            "has 3 stages, but the mesh has pipe=2, for which",
        ),
        ({"stages": 2}, InvalidStagesError, "needs `example_inputs`"),
        ({"stages": ["blocks.1"], "layouts": {"nothing": ("x",)}}, HintNotFoundError, "'nothing' matches no parameter"),
        ({"stages": ["blocks.1"], "layouts": {"head.bias": ("w",)}}, InvalidHintError, "axis 'w' is none of"),
        ({"stages": ["blocks.1"], "layouts": {"head.bias": ("x", None)}}, InvalidHintError, "2 entries.*1 dims"),
        ({"stages": ["blocks.1"], "layouts": {"blocks.0.0.weight": ("x", "x")}}, InvalidHintError, "used 2 times"),
        ({"stages": ["blocks.1"], "schedule": "2f2b"}, UnknownScheduleError, "unknown schedule '2f2b'.*'1f1b'"),
        (
            {"stages": ["blocks.1", "head"], "schedule": "interleaved"},
            InvalidStagesError,
            "'interleaved' runs a multiple of 2",
        ),
        (
            {"stages": ["blocks.1"], "schedule": [["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]]},
            InvalidStagesError,
            "the schedule runs 3 stages on 2 pipe ranks, but the model has 2 and the mesh has pipe=2",
        ),
        (
            {"stages": ["blocks.1"], "schedule": "0F0 1F0 1B0 0B0"},
            InvalidStagesError,
            "the schedule runs 2 stages on 1 pipe ranks",
        ),
        ({"stages": ["blocks.1"], "microbatches": 0}, InvalidOptionError, "microbatches.*positive integer"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with fake_mesh(pipe=2, x=2) as mesh, pytest.raises(error, match=message):
        distribute(Net(), mesh, **arguments)


ONE_F_ONE_B = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def _with_schedule(schedule: Any) -> Plan:
    with fake_mesh(pipe=2) as mesh:
        model = distribute(Net(), mesh, stages=["blocks.1"], microbatches=2, schedule=schedule)
        return _plan_of(model)


def _plan_of(model: nn.Module) -> Plan:
    torch.compiler.reset()
    return distribution_of(capture_forward(model, "cpu", EXAMPLE).model).final_plan


def test_ones_own_schedule_may_be_lists_text_a_file_or_a_schedule(tmp_path: Path) -> None:
    schedule = build_schedule("1f1b", 2, 2)
    path = tmp_path / "mine.csv"
    write_csv(schedule, path)
    forms = [ONE_F_ONE_B, str(schedule), path, str(path), schedule]
    assert {_with_schedule(form).schedule for form in forms} == {str(schedule)}


def test_ones_own_schedule_says_where_stages_are() -> None:
    with fake_mesh(pipe=2) as mesh:
        boundaries = ["blocks.0.2", "blocks.1", "head"]
        rows = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
        model = distribute(Net(), mesh, stages=boundaries, schedule=rows)
        assert _plan_of(model).placement == (0, 1, 1, 0)
        owned = {name for name, _ in model.named_parameters()}
        assert owned == {"blocks.0.0.weight", "blocks.0.0.bias", "head.bias"}


@pytest.mark.parametrize(
    ("rank_0", "message"),
    [
        ("0F0 0F1 0B1", r"rank 0: 0B0 is missing\n  .*--> 0B0\? <--"),
        ("0F0 0F1 0B0 0F1 0B1", r"rank 0, action 3: 0F1 runs a second time\n  0F0 0F1 0B0 --> 0F1 <-- 0B1"),
        ("0F0 0B1 0F1 0B0", r"rank 0, action 1: 0B1 runs before 0F1\n  0F0 --> 0B1 <-- 0F1 0B0"),
        ("0F0 0I0 0F1 0I1 0W0", r"rank 0: 0W1 is missing"),
        ("0F0 0X0", r"rank 0, action 1: '0X0' is not an action"),
    ],
    ids=["missing", "twice", "out of order", "half a backward", "no action"],
)
def test_a_schedule_that_is_no_schedule_is_refused_with_the_wrong_action_marked(rank_0: str, message: str) -> None:
    with pytest.raises(InvalidScheduleError, match=message):
        _with_schedule([rank_0.split(), ONE_F_ONE_B[1]])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidScheduleError, match=r"mine\.csv: expected a CSV file with a row of actions"):
        _with_schedule(tmp_path / "mine.csv")


def test_distributing_twice_is_an_error() -> None:
    with fake_mesh() as mesh:
        model = distribute(Net(), mesh)
        with pytest.raises(AlreadyDistributedError, match="Net is distributed already"):
            distribute(model, mesh)
        with pytest.raises(AlreadyDistributedError, match="module '1' of Sequential is distributed"):
            distribute(nn.Sequential(nn.Identity(), model), mesh)


def test_running_the_distributed_model_uncompiled_is_an_error() -> None:
    with fake_mesh() as mesh:
        model = distribute(Net(), mesh)
        with pytest.raises(NotCompiledError, match=r"torch.compile\(model, backend=\"fxpar\"\)"):
            model(torch.randn(4, 8))


def test_any_seed_of_torch_becomes_one_that_the_random_state_can_hold() -> None:
    torch.manual_seed(-1)  # the largest seed there is; unseeded, torch draws one of as many bits
    seed = own_seed()
    assert random_state(seed, step=0, first=0, microbatches=1)[0, 0] == seed
