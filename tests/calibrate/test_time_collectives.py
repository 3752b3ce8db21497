"""Collectives are timed in groups by host, and give back the rate of links that is known."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from fxpar.bench.hosts.emulated_cluster import EmulatedCluster
from fxpar.calibrate.network import KINDS, TimedCollective, fit_place
from fxpar.world.launch import run_ranks
from tests.calibrate.time_on_groups import time_groups

SIZES = (64, 4096)


def test_ranks_of_two_hosts_time_each_host_one_ring_between_them_and_all_rings() -> None:
    results = run_ranks(4, time_groups, SIZES, (0, 0, 1, 1))
    timed = results[0]
    assert all(found == timed for found in results), "every rank knows the same"
    places = ("inside hosts", "one ring between hosts", "all rings between hosts")
    assert Counter((each.place, each.kind) for each in timed) == dict.fromkeys(product(places, KINDS), len(SIZES))
    assert all(each.num_ranks == 2 and each.time_us > 0 for each in timed)
    sent = {each.kind: each.bytes_sent for each in timed if each.bytes_sent >= 2048}
    assert sent == {"all_gather": 2048, "all_reduce": 4096, "reduce_scatter": 2048}


def test_hosts_of_unequal_size_still_have_rings_between_them() -> None:
    timed = run_ranks(3, time_groups, SIZES[:1], (0, 0, 1))[0]
    assert {each.place for each in timed} == {"inside hosts", "one ring between hosts", "all rings between hosts"}


def test_one_rank_has_no_collectives_to_time() -> None:
    assert run_ranks(1, time_groups, SIZES) == [[]]


def test_the_rate_of_slow_links_is_found() -> None:
    """On links so slow that whatever else this machine does makes little difference to them."""
    if reason := EmulatedCluster.missing():
        pytest.skip(reason)
    with EmulatedCluster(2, rate_mbit=20) as cluster:
        timed: list[TimedCollective] = cluster.run(1, time_groups, (2**10, 2**16))[0]
    assert {each.place for each in timed} == {"one ring between hosts"}, "all rings are one"
    line = fit_place(timed, "one ring between hosts", "all_reduce")
    assert line is not None
    payload = 20 / 8 * 0.956  # what headers leave of 20 Mbit/s; a busy machine gives less, but none gives more
    assert 0.4 * payload < line.bytes_per_us < 1.15 * payload
