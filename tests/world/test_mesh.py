"""The mesh: ranks and coordinates."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from fxpar.errors import InvalidMeshError, MeshSizeError, TooFewQueuesError, UnknownClusterError
from fxpar.hardware.cluster import cluster_named
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh, batch_rank, init_mesh, mesh_sizes, num_batch_shards
from tests.support.fake_mesh import fake_mesh


def test_x_varies_fastest_then_y_z_data_pipe() -> None:
    mesh = Mesh(pipe=2, data=2, z=2, y=2, x=2)
    assert mesh.coordinate_of(1) == {"pipe": 0, "data": 0, "z": 0, "y": 0, "x": 1}
    assert mesh.coordinate_of(2)["y"] == 1
    assert mesh.coordinate_of(4)["z"] == 1
    assert mesh.coordinate_of(8)["data"] == 1
    assert mesh.coordinate_of(16)["pipe"] == 1
    assert [mesh.rank_at(mesh.coordinate_of(rank)) for rank in range(32)] == list(range(32))


def test_the_stage_mesh_ends_in_z() -> None:
    with fake_mesh(pipe=2, z=2, x=2) as mesh:
        assert mesh.stage_mesh.mesh_dim_names == ("x", "z")
        assert mesh.stage_mesh.mesh.tolist() == [[0, 2], [1, 3]]
    with fake_mesh(data=2, z=2, y=2, x=2) as mesh:
        assert mesh.stage_mesh.mesh_dim_names == ("data", "y", "x", "z")
    with fake_mesh() as mesh:
        assert mesh.stage_mesh.mesh_dim_names == ("data",), "a DeviceMesh has an axis, if only of one rank"


def test_batch_ranks_count_data_and_z() -> None:
    with fake_mesh(data=2, z=2, x=2) as mesh:
        assert num_batch_shards(mesh) == 4
        assert batch_rank(mesh) == 0
    assert [batch_rank(Mesh(data=2, z=2, x=2, rank=rank)) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_mesh_that_does_not_fit_the_processes_is_an_error() -> None:
    with fake_mesh(x=4), pytest.raises(MeshSizeError, match=r"has 6 ranks, but 4 processes.*start 6"):
        init_mesh(pipe=3, x=2)


def test_an_axis_that_is_no_positive_integer_is_an_error() -> None:
    with pytest.raises(InvalidMeshError, match="axis 'x' has size 0"):
        init_mesh(x=0)


def test_too_few_hardware_queues_for_a_pipeline_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(TooFewQueuesError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1: expected at least 8"):
        init_mesh(pipe=2, device_type="cuda")


def test_a_mesh_knows_its_cluster() -> None:
    with fake_mesh(x=2) as mesh:
        assert mesh.cluster is None
        assert init_mesh(x=2, cluster="perlmutter").cluster == cluster_named("perlmutter")
        with pytest.raises(UnknownClusterError, match="did you mean 'perlmutter'"):
            init_mesh(x=2, cluster="perlmuter")


def test_ranks_are_on_one_host_unless_told_otherwise() -> None:
    assert Mesh(pipe=2, x=2).hosts == (0, 0, 0, 0)
    assert Mesh(pipe=2, hosts=(0, 1)).hosts == (0, 1)
    with pytest.raises(InvalidMeshError, match="2 hosts are given for a mesh of 4 ranks"):
        Mesh(pipe=4, hosts=(0, 1))


def hosts_of_a_mesh(num_hosts: int) -> tuple[int, ...]:
    """Ranks take turns on the hosts."""
    os.environ["FXPAR_HOST"] = f"host {dist.get_rank() % num_hosts}"
    return init_mesh(x=4).hosts


def test_a_mesh_knows_the_host_of_every_rank() -> None:
    assert run_ranks(4, hosts_of_a_mesh, 2) == [(0, 1, 0, 1)] * 4


@pytest.mark.parametrize(
    "given", ["pipe=2 x=4", "pipe=2,x=4", "pipe=2 x x=4", "pipe=2 × data=1 × x=4", {"pipe": 2, "x": 4}]
)
def test_sizes_are_read_as_they_are_printed(given: Mapping[str, int] | str) -> None:
    assert mesh_sizes(given) == {"pipe": 2, "data": 1, "z": 1, "y": 1, "x": 4}
    assert mesh_sizes(str(Mesh(pipe=2, x=4))) == mesh_sizes(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pipe 2", "expected each axis once with its size"),
        ("x=2 x=4", "expected each axis once with its size"),
        ("x=-2", "expected each axis once with its size"),
        ({"tensor": 2}, "has an axis 'tensor': expected one of 'pipe', 'data', 'z', 'y', 'x'"),
        ({"x": 0}, "mesh axis 'x' has size 0"),
    ],
)
def test_what_are_no_sizes_is_told(given: Mapping[str, int] | str, message: str) -> None:
    with pytest.raises(InvalidMeshError, match=message):
        mesh_sizes(given)
