"""`fxpar calibrate` prints what it measured and writes a cluster file that can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxpar.cli import main
from fxpar.hardware.cluster import Cluster, cluster_named


def test_a_process_alone_measures_its_own_rates_and_says_whose_links_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "own.json"
    assert main(["calibrate", "--save", str(path), "--name", "own", "--json"]) == 0
    found, saved = json.loads(capsys.readouterr().out), Cluster.load(path)
    assert found["cluster"]["name"] == saved.name == "own"
    assert saved.ranks_per_host == 1
    laptop = cluster_named("laptop")
    assert saved.intra_bytes_per_us == laptop.intra_bytes_per_us
    assert "links inside hosts and between hosts are those of 'laptop'" in saved.source
    for dtype, rate in saved.matmul_flops_per_us.items():
        assert rate == max(each["flops_per_us"] for each in found["matmuls"] if each["dtype"] == dtype)
    assert saved.matmul_flops_per_us.keys() == {"float32", "bfloat16", "float16"}
    assert found["collectives"] == []
