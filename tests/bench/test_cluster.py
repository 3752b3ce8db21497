"""Emulated hosts: ranks live on them, only limited links join them, and nothing of them is ever left behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxpar.bench.hosts.emulated_cluster import DEVICE, EmulatedCluster
from fxpar.bench.hosts.namespace import NetworkNamespace
from fxpar.errors import ClusterUnavailableError
from fxpar.world.launch import run_ranks
from tests.bench.on_hosts import exchange, make_cluster_as_nobody, own_address, own_priority, time_to_send, value_of
from tests.support.killed_process import kill_and_await_end_of_all, next_line, running

RANKS_PER_HOST = (2, 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    """Two hosts."""
    if reason := EmulatedCluster.missing():
        pytest.skip(reason)
    with EmulatedCluster(2, rate_mbit=100) as cluster:
        yield cluster


def queues(network: NetworkNamespace, device: str) -> str:
    """How `device` sends."""
    classes = network.run(["tc", "class", "show", "dev", device])
    return network.run(["ip", "-details", "link", "show", device]) + classes


def bytes_switched(cluster: EmulatedCluster) -> list[tuple[int, int]]:
    """How much each host has sent to the switch and received from it, so far."""
    assert cluster.switch is not None
    devices = {device["ifname"]: device for device in json.loads(cluster.switch.run(["ip", "-json", "-s", "link"]))}
    counts = [devices[f"host{host}"]["stats64"] for host in range(cluster.num_hosts)]
    return [(count["rx"]["bytes"], count["tx"]["bytes"]) for count in counts]


def test_ranks_are_numbered_host_by_host_and_each_host_has_its_address(cluster: EmulatedCluster) -> None:
    assert cluster.run(RANKS_PER_HOST, own_address) == [(0, "10.0.0.1"), (1, "10.0.0.1"), (2, "10.0.0.2")]
    assert cluster.hosts_of_ranks(RANKS_PER_HOST) == [0, 0, 1]
    assert cluster.hosts_of_ranks(2) == [0, 0, 1, 1]


def test_ranks_go_before_what_else_the_machine_runs(cluster: EmulatedCluster) -> None:
    ((niceness, may_change_it),) = cluster.run((0, 1), own_priority)
    if not may_change_it:
        pytest.skip("a rank may not take a higher priority here (CAP_SYS_NICE)")
    assert niceness < os.getpriority(os.PRIO_PROCESS, 0)


def test_ranks_for_another_number_of_hosts_are_refused() -> None:
    with pytest.raises(AssertionError, match="ranks for 3 hosts, but there are 2"):
        EmulatedCluster(2).hosts_of_ranks((1, 1, 1))


@pytest.mark.usefixtures("cluster")
def test_both_ends_of_every_link_are_limited_and_serve_the_other_hosts_in_turns() -> None:
    with EmulatedCluster(3, rate_mbit=100) as cluster:
        assert cluster.switch is not None
        ends = [(cluster.switch, f"host{host}") for host in range(3)] + [(host, DEVICE) for host in cluster.hosts]
        for network, device in ends:
            found = queues(network, device)
            assert "htb 1:ffff root rate 100Mbit ceil 100Mbit" in found, found
            assert found.count("parent 1:ffff") == found.count("rate 50Mbit ceil 100Mbit burst 18Kb") == 2, found
            assert "gso_max_size 16384" in found, found


def test_every_rank_reaches_every_other_with_whole_values(cluster: EmulatedCluster) -> None:
    num_bytes = 100_000
    for own, received in enumerate(cluster.run(RANKS_PER_HOST, exchange, num_bytes)):
        senders = [rank for rank in range(3) if rank != own]
        for sender, value in zip(senders, received, strict=True):
            assert torch.equal(value, value_of(sender, num_bytes)), f"from rank {sender} to rank {own}"


def test_the_switch_carries_what_hosts_exchange_and_nothing_else(cluster: EmulatedCluster) -> None:
    num_bytes, small = 3_000_000, 300_000
    before = bytes_switched(cluster)
    cluster.run((2, 0), exchange, num_bytes)
    between = bytes_switched(cluster)
    cluster.run((1, 1), exchange, num_bytes)
    after = bytes_switched(cluster)
    for host in range(2):
        for way in range(2):
            assert between[host][way] - before[host][way] < small, "ranks of one host used its link"
            assert after[host][way] - between[host][way] > num_bytes, "ranks of two hosts did not use their links"


def test_messages_between_hosts_take_their_time(cluster: EmulatedCluster) -> None:
    num_bytes = 1_000_000
    within = cluster.run(RANKS_PER_HOST, time_to_send, 1, num_bytes)[1]
    between = cluster.run(RANKS_PER_HOST, time_to_send, 2, num_bytes)[2]
    assert between > 5 * within


def test_nothing_is_left_of_a_cluster_whose_process_was_killed() -> None:
    if reason := EmulatedCluster.missing():
        pytest.skip(reason)
    observer = NetworkNamespace()
    with running("tests.bench.on_hosts", "hold_cluster") as process:
        watch(observer, next_line(process).split())
        assert next_line(process) == "all are there"
        assert num_watched(observer) == 3
        kill_and_await_end_of_all(process)
    await_end_of_networks(observer)


def test_the_hosts_go_when_the_context_ends_even_by_an_error() -> None:
    if reason := EmulatedCluster.missing():
        pytest.skip(reason)
    observer = NetworkNamespace()
    with pytest.raises(KeyError), EmulatedCluster(2) as cluster:
        assert cluster.switch is not None
        watch(observer, [network.path for network in (cluster.switch, *cluster.hosts)])
        assert num_watched(observer) == 3
        raise KeyError
    await_end_of_networks(observer)


def watch(observer: NetworkNamespace, paths: list[str]) -> None:
    """Lay a wire into each network; the kernel takes both its ends away when it takes the network away."""
    for i, path in enumerate(paths):
        observer.run(["ip", *f"link add watched{i} type veth peer name wire netns {path}".split()])


def num_watched(observer: NetworkNamespace) -> int:
    """How many of the networks still exist."""
    return observer.run(["ip", "link"]).count("watched")


def await_end_of_networks(observer: NetworkNamespace) -> None:
    """The kernel takes networks away in its own time, soon after nothing holds them."""
    deadline = time.monotonic() + 60
    while num_watched(observer):
        assert time.monotonic() < deadline, observer.run(["ip", "link"])
    observer.close()


def test_a_machine_without_the_commands_is_told_what_is_missing(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterUnavailableError, match=r"No such file or directory: 'ip'; this needs .*iproute2"):
        EmulatedCluster(1).__enter__()


def test_a_kernel_without_rate_limits_is_quoted(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    tc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ClusterUnavailableError, match="but `tc` says: Error: Specified qdisc kind is unknown"):
        EmulatedCluster(1).__enter__()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no namespaces to be refused")
def test_an_ordinary_user_is_told_to_be_root() -> None:
    (reason,) = run_ranks(1, make_cluster_as_nobody)
    assert "unshare: Operation not permitted; this needs" in reason
    assert "and root" in reason
