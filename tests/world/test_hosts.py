"""Ranks share a host where they see the same kernel and network and can open each other's files."""

from __future__ import annotations

import os

import pytest

from fxpar.world.hosts import OpenFile, group_hosts, host_identity
from fxpar.world.launch import run_ranks
from tests.support.look_for_hosts import hosts_in_namespaces, hosts_of_some, hosts_when_named


def test_ranks_of_one_machine_are_one_host() -> None:
    assert run_ranks(3, hosts_when_named, [None] * 3, timeout_s=60) == [(0, 0, 0)] * 3


def test_hosts_can_be_named_and_are_numbered_by_their_first_ranks() -> None:
    assert run_ranks(4, hosts_when_named, ["b", "a", None, "a"], timeout_s=60) == [(0, 1, 2, 1)] * 4


def test_a_group_has_hosts_of_its_own() -> None:
    assert run_ranks(3, hosts_of_some, [1, 2], timeout_s=60) == [(), (0, 0), (0, 0)]


def test_a_network_namespace_is_a_host() -> None:
    found = run_ranks(4, hosts_in_namespaces, [1, 2], timeout_s=60)
    if found[0] is None:
        pytest.skip("this user may not make network namespaces")
    assert found == [(0, 1, 2, 0)] * 4


def test_ranks_that_cannot_open_each_other_s_files_are_hosts_apart() -> None:
    everyone = set(range(4))
    assert group_hosts([everyone] * 4) == (0, 0, 0, 0)
    assert group_hosts([{0, 2}, {1, 3}, {0, 2}, {1, 3}]) == (0, 1, 0, 1)
    assert group_hosts([set()] * 3) == (0, 1, 2)
    assert group_hosts([everyone, everyone, {0, 2}, everyone]) == (0, 0, 1, 0), "both must reach the other"


def test_the_identity_is_the_name_given_or_the_kernel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HOST", "node-7")
    assert host_identity() == "node-7"
    monkeypatch.delenv("FXPAR_HOST")
    assert os.readlink("/proc/self/ns/net") in host_identity()


def test_a_file_is_opened_only_where_it_is_the_same() -> None:
    fd = os.memfd_create("test")
    file = OpenFile.of(fd)
    assert file.can_be_shared()
    opened = file.open()
    assert os.path.sameopenfile(fd, opened)
    assert not OpenFile(file.pid, 0, file.inode).can_be_shared(), "this descriptor is another file"
    assert not OpenFile(os.getppid(), fd, file.inode).can_be_shared(), "this process has another file there"
    os.close(opened)
    os.close(fd)
    assert not file.can_be_shared(), "it was closed"
