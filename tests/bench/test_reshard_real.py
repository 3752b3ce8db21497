"""Transfers between the halves of the ranks that run, on one host and on several; and of what torchrun started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxpar.bench.reshard.real import REPEATS, bars, measure_halves, row
from fxpar.resharding.strategies import STRATEGIES
from fxpar.world.launch import RankFailedError, run_ranks
from tests.bench.time_on_ranks import measure_on_hosts

FXPAR = str(Path(sys.executable).with_name("fxpar"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node")
NUM_BYTES = 1 << 16


def test_every_rank_knows_the_times_of_the_last_one() -> None:
    first, *others = run_ranks(4, measure_on_hosts, 4, NUM_BYTES, timeout_s=60)
    assert [each.strategy for each in first] == list(STRATEGIES)
    for found in others:
        assert [each.seconds for each in found] == [each.seconds for each in first]


@pytest.mark.parametrize(("ranks_per_host", "volumes"), [(4, (0, 0)), (2, (NUM_BYTES, 2 * NUM_BYTES))])
def test_the_goal_is_for_what_crosses_the_network(ranks_per_host: int, volumes: tuple[int, int]) -> None:
    found, *_ = run_ranks(4, measure_on_hosts, ranks_per_host, NUM_BYTES, timeout_s=60)
    broadcast, send_recv, *_ = found
    assert (broadcast.transfer.plan.num_bytes, send_recv.transfer.plan.num_bytes) == volumes
    assert len(list(bars(broadcast, send_recv))) == (volumes != (0, 0))
    shown = row(broadcast, torch.device("cpu"))
    assert (shown["hosts"], shown["ranks"], shown["repeats"]) == (4 // ranks_per_host, 4, REPEATS)
    assert shown["tensor_mb_per_s"] == pytest.approx(NUM_BYTES / broadcast.median_s / 1e6)


def test_a_single_rank_has_no_halves() -> None:
    with pytest.raises(RankFailedError, match=r"ReshardError: expected 2 ranks or more .*, but this world has 1"):
        run_ranks(1, measure_halves, torch.device("cpu"), timeout_s=60)


def test_of_many_ranks_under_torchrun_one_prints() -> None:
    done = subprocess.run([*TORCHRUN, "2", FXPAR, "bench", "reshard", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {(row["ranks"], row["strategy"]) for row in found["rows"]} == {(2, strategy) for strategy in STRATEGIES}
