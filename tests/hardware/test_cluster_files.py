"""Cluster files are complete, come back as they were saved, and say what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar.errors import InvalidClusterError, UnknownClusterError
from fxpar.hardware.cluster import Cluster, cluster_named, cluster_names, default_cluster, read_cluster

A100 = cluster_named("dgx-a100")


def written(path: Path, **changes: Any) -> Path:
    """The file of a cluster with some figures changed, or left out where they become `...`."""
    A100.save(path)
    figures = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: figure for name, figure in figures.items() if figure is not ...}))
    return path


@pytest.mark.parametrize("name", cluster_names())
def test_every_published_cluster_can_be_read_and_says_whose_figures_it_has(name: str) -> None:
    cluster = cluster_named(name)
    assert cluster.name == name
    assert len(cluster.source) > 50
    assert cluster.host_bytes_per_us <= cluster.ranks_per_host * cluster.intra_bytes_per_us
    assert cluster.memory_bytes_per_us > cluster.intra_bytes_per_us


def test_published_machines_are_there() -> None:
    assert cluster_names() == ["dgx-a100", "dgx-h100", "dgx-h200", "laptop", "p3.8xlarge", "perlmutter"]


def test_a_cluster_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    A100.save(tmp_path / "own.json")
    assert read_cluster(tmp_path / "own.json") == read_cluster(str(tmp_path / "own.json")) == A100
    assert read_cluster(A100) is A100
    assert read_cluster("dgx-a100") == A100


def test_a_dtype_without_a_rate_has_that_of_float32() -> None:
    assert A100.flops_per_us(torch.bfloat16) == 312e6
    assert A100.flops_per_us(torch.float64) == 19.5e6


def test_interfaces_of_a_host_send_together() -> None:
    assert A100.host_bytes_per_us == 8 * 25e3
    assert A100.network.bytes_per_us == 25e3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"intra_bytes_per_us": ...}, "intra_bytes_per_us: expected a positive number, found nothing"),
        ({"memory_bytes": -1.0}, "memory_bytes: expected a positive number, found -1.0"),
        ({"inter_latency_us": 0}, "inter_latency_us: expected a positive number, found 0"),
        ({"interface_bytes_per_us": float("nan")}, "interface_bytes_per_us: expected a positive number, found nan"),
        ({"interface_bytes_per_us": float("inf")}, "interface_bytes_per_us: expected a positive number, found inf"),
        ({"memory_bytes_per_us": "fast"}, "memory_bytes_per_us: expected a positive number, found 'fast'"),
        ({"memory_bytes_per_us": True}, "memory_bytes_per_us: expected a positive number, found True"),
        ({"ranks_per_host": 2.5}, "ranks_per_host: expected a positive integer, found 2.5"),
        ({"matmul_flops_per_us": {"bfloat16": 1.0}}, "matmul_flops_per_us: expected .* 'float32' among them"),
        ({"matmul_flops_per_us": {"float32": 1.0, "float": -2.0}}, "matmul_flops_per_us: expected positive numbers"),
        ({"matmul_flops_per_us": {"float32": 1.0, "fp16": 2.0}}, "by names of dtypes"),
        ({"device_type": "tpu"}, "device_type: expected 'cpu' or 'cuda', found 'tpu'"),
        ({"name": ""}, "name: expected a name, found ''"),
        ({"bandwidth": 3}, "bandwidth: expected one of name, source"),
    ],
)
def test_a_wrong_file_is_told_by_file_and_figure(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = written(tmp_path / "wrong.json", **changes)
    with pytest.raises(InvalidClusterError, match=told) as error:
        Cluster.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_what_is_no_json_object_is_told_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(InvalidClusterError, match="expected one JSON object"):
        Cluster.load(path)


def test_a_file_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidClusterError, match="No such file"):
        read_cluster(tmp_path / "none.json")


def test_figures_are_checked_wherever_a_cluster_is_made() -> None:
    with pytest.raises(InvalidClusterError, match="the cluster 'dgx-a100': intra_latency_us"):
        replace(A100, intra_latency_us=-1.0)


def test_an_unknown_name_is_told_with_those_that_are_known() -> None:
    with pytest.raises(UnknownClusterError, match=r"did you mean 'dgx-a100'\?; the name of a file"):
        read_cluster("dgx-a10")


def test_processes_without_a_gpu_are_taken_for_a_laptop() -> None:
    assert default_cluster("cpu") == cluster_named("laptop")
