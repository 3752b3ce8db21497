"""A step is explained: its parts add up to it, and for a bad choice the first proposal is to undo it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.cli import main
from fxpar.errors import HintNotFoundError, InvalidMeshError, UnknownClusterError, UnknownScheduleError
from fxpar.explainer.explain import Explanation, explain
from fxpar.explainer.proposals import whole_parts
from fxpar.hardware.cluster import cluster_named

WIDTH, ROWS, LAYERS = 64, 32, 4


class Net(nn.Module):
    """Linear layers of one width, whose authors ship a plan for half of them."""

    _tp_plan: Mapping[str, str] = {"layers.0": "colwise", "layers.1": "rowwise", "head": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


def net() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    """For the command, with settings."""
    settings = {"mesh": {"data": 2}, "cluster": CLUSTER, "microbatches": 2, "most": 1, "seconds": 600.0}
    return Net(), (torch.zeros(ROWS, WIDTH),), settings


def net_without_settings() -> tuple[nn.Module, tuple[Tensor]]:
    """For the command."""
    return Net(), (torch.zeros(ROWS, WIDTH),)


def net_with_a_misspelled_setting() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    """For the command."""
    return Net(), (torch.zeros(ROWS, WIDTH),), {"microbatch": 2}


def nothing() -> None:
    """For the command."""


CLUSTER = replace(
    cluster_named("laptop"),
    ranks_per_host=2,
    matmul_flops_per_us={"float32": 1e3},
    intra_latency_us=1.0,
    inter_latency_us=10.0,
    interface_bytes_per_us=20.0,
)
"""On which gradients take longer between hosts than values between stages, and nothing takes long inside a host."""


def explained(mesh: str, rows: int = ROWS, **given: Any) -> Explanation:
    with torch.device("meta"):
        model, batch = Net(), (torch.zeros(rows, WIDTH),)
    return explain(model, batch, mesh=mesh, **{"cluster": CLUSTER, "most": 3, "seconds": 600.0, **given})


@pytest.fixture(scope="module")
def few_microbatches() -> Explanation:
    """A pipeline whose ranks never work at the same time."""
    return explained("pipe=2 x x=2")


def test_parts_add_up_to_the_step(few_microbatches: Explanation) -> None:
    parts = {part.label: part.time_us for part in whole_parts(few_microbatches.estimate)}
    assert sum(parts.values()) == pytest.approx(few_microbatches.step_us, rel=1e-9)
    assert all(time_us >= 0 for time_us in parts.values())
    assert parts["computation"] > 0 and parts["bubble"] > 0 and parts["optimizer"] > 0
    assert parts["exposed communication over x"] > 0
    assert parts[few_microbatches.bound_by] == max(parts.values())


def test_too_few_microbatches_are_told_first(few_microbatches: Explanation) -> None:
    first, *others = few_microbatches.proposals
    assert first.change.kind == "microbatches" and first.change.setup.microbatches > 1
    assert first.reason.startswith(("bubble: -", "exposed communication over pipe: -"))
    assert first.gain > 0.2
    assert first.step_us == pytest.approx((1 - first.gain) * few_microbatches.step_us)
    assert [each.gain for each in others] == sorted((each.gain for each in others), reverse=True)
    assert len({each.change.kind for each in few_microbatches.proposals}) == len(few_microbatches.proposals) <= 3


def test_stages_ranks_axes_and_collectives_have_their_figures(few_microbatches: Explanation) -> None:
    stages = few_microbatches.stages
    assert [(each.num_parameters, each.pipe_rank) for each in stages] == [(2 * WIDTH**2, 0), (2 * WIDTH**2, 1)]
    assert [each.parameter_bytes for each in stages] == [4 * WIDTH**2, 4 * WIDTH**2], "halves over x"
    assert stages[1].opened_by == "layers.2"
    assert max(each.peak_bytes for each in few_microbatches.ranks) == few_microbatches.estimate.peak_bytes
    assert {each.axis: each.num_hosts for each in few_microbatches.axes} == {"pipe": 2, "x": 1}
    sent = sum(each.num_layers * each.traffic.bytes_sent for each in few_microbatches.collectives)
    assert sent == 3 * ROWS * WIDTH * 4, "outputs of two pairs of layers, and one input gradient that is needed"


def test_tensor_parallelism_over_a_slow_network_is_told_first() -> None:
    found = explained("x=4")
    assert found.bound_by == "exposed communication over x"
    assert [each.num_hosts for each in found.axes] == [2]
    first = found.proposals[0]
    assert first.change.kind == "mesh" and first.change.setup.mesh["x"] < 4
    assert first.reason.startswith("exposed communication over x: -")


def test_matrices_that_hints_keep_whole_are_told() -> None:
    """Of a batch of one row, so that nothing but the matrices can be divided."""
    found = explained("x=2", rows=1, layouts={"layers.*.weight": (None, None)}, most=1)
    (repeated, *_) = found.repeated
    assert (repeated.modules, repeated.axes) == ("layers.*", ("x",))
    assert repeated.wasted_us > 0.25 * found.step_us
    first = found.proposals[0]
    assert first.change.kind == "layouts"
    assert first.change.text in ('layouts="search"', "layouts with the hint 'layers.*.weight': ('x', None)")
    assert any("with the hint 'layers.*.weight'" in each.change.text for each in found.tried)


def test_what_does_not_fit_is_told_with_changes_that_do() -> None:
    roomy = explained("data=2", rows=4096, most=1)
    assert roomy.fits
    budget = 0.8 * roomy.estimate.peak_bytes
    tight = explained("data=2", rows=4096, most=6, memory_bytes=budget)
    assert not tight.fits
    assert tight.proposals and all(each.estimate.peak_bytes <= budget for each in tight.tried)
    assert "microbatches" in {each.change.kind for each in tight.tried}
    assert any("of memory" in reason for reason in tight.left_out.values())


def test_the_shipped_plan_is_read_or_ignored() -> None:
    read = explained("x=2", layouts={"layers.1.weight": ("x", None)}, most=1)
    verdicts = {each.entry.key: each.verdict for each in read.shipped_plan.entries}
    assert read.shipped_plan.status == "read"
    assert verdicts["layers.0"] == "used"
    assert verdicts["layers.1"] == "overridden by `layouts` for 1"
    assert "names no parameter or module" in verdicts["head"]
    tried = {each.change.text for each in read.tried}
    assert {'layouts="search"', 'layouts="plan"'} <= tried
    assert explained("data=2", most=1).shipped_plan.status == "ignored"


FIELDS = {
    "cluster": str,
    "setup": dict,
    "step_us": float,
    "parts_us": dict,
    "bound_by": str,
    "peak_bytes": int,
    "memory_bytes": float,
    "fits": bool,
    "memory_options": dict,
    "stages": list,
    "ranks": list,
    "axes": list,
    "collectives": list,
    "repeated_work": list,
    "shipped_plan": dict,
    "proposals": list,
    "tried": list,
    "left_out": dict,
}
OF_PROPOSALS = {"kind", "change", "setup", "step_us", "gain", "reason", "peak_bytes"}


def test_the_command_prints_json_with_stable_fields(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mesh", "pipe=2", "--microbatches", "1", "--option", "remat=full", "--json"]
    assert main(["explain", f"{__file__}:net", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: type(value) for name, value in found.items()} == FIELDS
    assert found["setup"]["mesh"] == {"pipe": 2, "data": 1, "z": 1, "y": 1, "x": 1}, "flags override what is returned"
    assert found["setup"]["options"] == {"remat": "full"}
    parts = found["parts_us"]
    assert {"compute", "exposed_pipe", "bubble", "optimizer"} <= set(parts)
    assert math.isclose(sum(parts.values()), found["step_us"], rel_tol=1e-9)
    assert all(set(each) == OF_PROPOSALS for each in (*found["proposals"], *found["tried"]))
    assert "options={'remat': 'none'}" in {each["change"] for each in found["tried"]}


def test_limits_given_as_flags_override_those_that_are_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{__file__}:net", "--seconds", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "not estimated within 0 seconds" in found["left_out"].values()


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{__file__}:net"]) == 0
    shown = capsys.readouterr().out
    assert "data=2, 2 microbatches, eager-1f1b on laptop: a step of " in shown
    for title in ("stages, for one microbatch", "what the step's time is spent on", "100.0%"):
        assert title in shown


def test_the_python_function_has_the_same_name() -> None:
    assert fxpar.explain is explain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "pipe=two"], "expected each axis once with its size, as in 'pipe=2 x=4'"),
        (["--mesh", "w=2"], "has an axis 'w': expected one of"),
        (["--mesh", "x=0"], "mesh axis 'x' has size 0"),
        (["--cluster", "labtop"], "unknown cluster 'labtop': expected one of"),
        (["--cluster", "nowhere.json"], "nowhere.json"),
        (["--schedule", "2f2b"], "2f2b"),
        (["--option", "remat=all"], "remat"),
        (["--microbatches", "5"], "a batch of 32 does not divide into 2 batch shards of 5 microbatches each"),
    ],
)
def test_wrong_input_is_told(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{__file__}:net", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "expected a function MODULE:FUNCTION (or FILE.py:FUNCTION)"),
        ("net_without_settings", 'expected a mesh, found none; give --mesh "pipe=2 x=4"'),
        ("net_with_a_misspelled_setting", "did you mean 'microbatches'?"),
        ("nothing", "nothing': it returns NoneType"),
    ],
)
def test_functions_that_return_something_else_are_told(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{__file__}:{name}", "--cluster", "laptop"]) == 2
    assert message in capsys.readouterr().err


def test_errors_of_the_function_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InvalidMeshError, match="expected one of 'pipe', 'data', 'z', 'y', 'x'"):
        explained("t=2")
    with pytest.raises(UnknownClusterError):
        explained("x=2", cluster="none")
    with pytest.raises(UnknownScheduleError):
        explained("pipe=2", schedule="none")
    with pytest.raises(HintNotFoundError):
        explained("x=2", layouts={"none.weight": ("x", None)})
