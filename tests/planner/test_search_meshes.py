"""Configurations are ranked without the cluster: by graphs as they would run, and by what fits into memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.cli import main
from fxpar.errors import PlanningError
from fxpar.hardware.cluster import Cluster, cluster_named
from fxpar.planner.imagined_mesh import imagined_mesh, imagined_world
from fxpar.planner.search import Ranking, plan
from fxpar.planner.step_model import StepModel, local_batch
from tests.support.fake_mesh import fake_mesh

WIDTH, ROWS, LAYERS = 64, 32, 4


class Net(nn.Module):
    """Linear layers of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


class Blocks(nn.Module):
    """Layers that save much more than what enters them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def net_and_batch() -> tuple[nn.Module, tuple[Tensor]]:
    """For the command."""
    return Net(), (torch.zeros(ROWS, WIDTH),)


def on_meta() -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        return net_and_batch()


def wide_blocks() -> tuple[nn.Module, tuple[Tensor]]:
    """Whose activations take more than their weights, whatever is computed again."""
    with torch.device("meta"):
        return Blocks(), (torch.zeros(128 * ROWS, WIDTH),)


CLUSTER = replace(cluster_named("laptop"), ranks_per_host=2)


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    """Of all meshes of two ranks."""
    return plan(*on_meta(), CLUSTER, 2, microbatches=[2], schedules=["1f1b", "zb-h1"])


def test_every_configuration_is_ranked_or_left_out_with_a_reason(ranking: Ranking) -> None:
    configurations = {str(each.configuration) for each in ranking.ranked} | {str(each) for each in ranking.left_out}
    axes = ("pipe", "data", "z", "y", "x")
    assert configurations == {f"{axis}=2, 2 microbatches" for axis in axes}
    assert all(ranking.left_out.values())


def test_the_fastest_comes_first_and_the_others_say_what_they_lose_by(ranking: Ranking) -> None:
    times = [each.estimate.step_us for each in ranking.ranked]
    assert times == sorted(times)
    assert ranking.best is ranking.ranked[0].estimate
    assert ranking.ranked[0].drawback == ""
    assert all(each.drawback.endswith(" ms") for each in ranking.ranked[1:])


def test_gradients_are_all_that_ranks_along_data_send(ranking: Ranking) -> None:
    (found,) = [each for each in ranking.ranked if str(each.configuration) == "data=2, 2 microbatches"]
    traffic = found.estimate.traffic
    assert list(traffic) == ["data"]
    assert traffic["data"].bytes_sent == LAYERS * WIDTH * WIDTH * 4, "a ring of two sends half of it twice"


def test_along_z_as_many_bytes_are_gathered_and_scattered_as_reduced_along_data(ranking: Ranking) -> None:
    """Eqs. 4 and 5 of Singh et al. together are Eq. 8."""
    (found,) = [each for each in ranking.ranked if str(each.configuration) == "z=2, 2 microbatches"]
    assert found.estimate.traffic["z"].bytes_sent == LAYERS * WIDTH * WIDTH * 4


def test_without_a_pipeline_a_batch_is_divided_as_far_as_memory_asks() -> None:
    def configurations(memory_bytes: float | None = None) -> tuple[list[str], Ranking]:
        found = plan(*wide_blocks(), CLUSTER, 1, memory_bytes=memory_bytes)
        return [str(each.configuration) for each in found.ranked], found

    names, whole = configurations()
    assert names == ["one rank, 1 microbatch"]
    reasons = {str(each): reason for each, reason in whole.left_out.items()}
    assert reasons["one rank, 2 microbatches"] == "it fits with fewer microbatches, which take no more time"
    names, divided = configurations(0.3 * whole.best.peak_bytes)
    assert len(names) == 1 and names != ["one rank, 1 microbatch"]
    assert divided.best.peak_bytes <= 0.3 * whole.best.peak_bytes


def test_where_gathered_weights_do_not_fit_they_are_gathered_for_every_microbatch(ranking: Ranking) -> None:
    (found,) = [each for each in ranking.ranked if str(each.configuration) == "z=2, 2 microbatches"]
    once, budget = found.estimate, 0.9 * found.estimate.peak_bytes
    each_time = plan(*on_meta(), CLUSTER, 2, axes=("z",), microbatches=[2], memory_bytes=budget).best
    assert each_time.peak_bytes <= budget < once.peak_bytes
    assert once.options == {"remat": "none", "gather_weights": "step", "reduce_gradients": "step"}
    assert "microbatch" in each_time.options.values()
    assert once.traffic["z"].bytes_sent < each_time.traffic["z"].bytes_sent <= 2 * once.traffic["z"].bytes_sent


def test_where_what_is_saved_does_not_fit_it_is_computed_again() -> None:
    """Of many rows, so that activations are most of the memory."""
    with torch.device("meta"):
        model, batch = Blocks(), (torch.zeros(1024, WIDTH),)
    kept = plan(model, batch, CLUSTER, 2, axes=("data",)).best
    again = plan(model, batch, CLUSTER, 2, axes=("data",), memory_bytes=0.6 * kept.peak_bytes).best
    assert (kept.options["remat"], again.options["remat"]) == ("none", "full")
    assert again.peak_bytes <= 0.6 * kept.peak_bytes
    assert again.compute_us > kept.compute_us
    assert again.traffic == kept.traffic


def test_the_plan_of_the_best_can_be_distributed(ranking: Ranking, tmp_path: Path) -> None:
    ranking.best.plan.save(tmp_path / "plan.json")
    loaded = fxpar.Plan.load(tmp_path / "plan.json")
    with fake_mesh(**loaded.mesh) as mesh:
        torch.compiler.reset()
        model = fxpar.distribute(Net(), mesh, plan=loaded)
        own = {name for name, parameter in loaded.parameters.items() if parameter.stage == 0}
        assert {name for name, _ in model.named_parameters()} == own


def test_the_model_is_not_changed() -> None:
    model, batch = on_meta()
    with imagined_world(2):
        StepModel(model, batch, imagined_mesh({"x": 2}, CLUSTER), 1)
    assert type(model) is Net
    assert all(parameter.is_meta for parameter in model.parameters())


def test_slow_networks_are_avoided() -> None:
    """Two hosts of two ranks: along the axis between them a step sends less than along the one inside."""
    slow: Cluster = replace(CLUSTER, interface_bytes_per_us=0.1, intra_bytes_per_us=1e4, memory_bytes_per_us=1e3)
    found = plan(*on_meta(), slow, 4, axes=("data", "x"), microbatches=[1]).ranked
    by_mesh = {str(each.configuration): each.estimate for each in found}
    outside, inside = (by_mesh[f"{name}, 1 microbatch"] for name in ("data=4", "data=2 x=2"))
    assert outside.traffic["data"].bytes_sent > inside.traffic["data"].bytes_sent
    assert inside.step_us < outside.step_us


def test_what_fits_nowhere_is_told_with_what_needs_least() -> None:
    with pytest.raises(PlanningError, match=r"nothing fits into 0.000 GiB .*: the least is .* GiB, by "):
        plan(*on_meta(), CLUSTER, 2, memory_bytes=1000.0)


def test_what_its_graphs_need_counts_too() -> None:
    """The weights would fit, but not with what is saved for the backward."""
    weights = 4 * LAYERS * WIDTH * WIDTH * 4
    with pytest.raises(PlanningError, match=r"the least is .* by data=2, 1 microbatch"):
        plan(*on_meta(), CLUSTER, 2, axes=("data",), memory_bytes=weights * 1.01)


def test_a_look_that_would_take_too_long_is_not_begun() -> None:
    found = plan(*on_meta(), CLUSTER, 2, microbatches=[2], schedules=["1f1b"], seconds=1e-6)
    assert len(found.ranked) == 1, "one at least"
    assert "not estimated from graphs within 0 seconds" in found.left_out.values()


def test_a_batch_that_no_mesh_divides_is_told() -> None:
    with pytest.raises(PlanningError, match="no mesh of 2 ranks divides a batch of 32"):
        plan(*on_meta(), CLUSTER, 2, microbatches=[5])


def test_an_axis_that_no_mesh_has_is_told() -> None:
    with pytest.raises(PlanningError, match="no axis of a mesh is called w; take some of pipe, data, z, y, x"):
        plan(*on_meta(), CLUSTER, 2, axes=("w",))


def test_a_rank_of_a_real_world_cannot_plan() -> None:
    with fake_mesh(x=2), pytest.raises(PlanningError, match="a process of its own"):
        plan(*on_meta(), CLUSTER, 2)
    assert not dist.is_initialized()


def test_each_shard_has_its_part_of_what_is_split() -> None:
    shared, split = torch.zeros(3), torch.zeros(8, 2)
    assert [tuple(leaf.shape) for leaf in local_batch((split, shared), 2, 2, {})] == [(4, 2), (3,)]
    with pytest.raises(fxpar.FxparError, match="8"):
        local_batch({"x": split}, 3, 1, {})


def test_the_command_prints_the_ranking_and_writes_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CLUSTER.save(tmp_path / "own.json")
    flags = ["--cluster", str(tmp_path / "own.json"), "--axes", "data", "--save", str(tmp_path / "plan.json")]
    assert main(["plan", "tests.planner.test_search_meshes:net_and_batch", *flags]) == 0
    assert "data=2, 1 microbatch" in capsys.readouterr().out
    assert fxpar.Plan.load(tmp_path / "plan.json").mesh["data"] == 2
    assert main(["plan", f"{__file__}:net_and_batch", *flags, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["ranked"]
    assert row["mesh"] == {"pipe": 1, "data": 2, "z": 1, "y": 1, "x": 1}
    assert row["step_us"] > row["compute_us"] > 0


@pytest.mark.parametrize("name", ["nothing", "tests.planner.none:f", "tests.planner.test_search_meshes:f", "none.py:f"])
def test_a_model_that_is_not_there_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name, "--cluster", "laptop"]) == 2
    assert "expected a function MODULE:FUNCTION" in capsys.readouterr().err
