"""Find which ranks share a host: its ranks can map each other's memory, and share a network interface."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fxpar.core.kernel_files import memory_file, process_file
from fxpar.environment import host_name


def host_identity() -> str:
    """A name that is the same for all ranks of this host, and for no others.

    It is the kernel's boot id with the network namespace, or the value of FXPAR_HOST. Containers of one kernel that
    have their own network namespaces are different hosts.
    """
    named = host_name()
    if named is not None:
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return platform.node()


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that process `pid` has open as `fd`, for others to open; they check `inode`, to open the same file."""

    pid: int
    fd: int
    inode: tuple[int, int]

    @classmethod
    def of(cls, fd: int) -> OpenFile:
        """The record of this process's `fd`, which must stay open until others have opened it."""
        return cls(os.getpid(), fd, _inode(os.fstat(fd)))

    def watch(self) -> int:
        """A descriptor of the process, readable once it has ended. It is the right process if a later `open` succeeds.

        Raises:
            OSError: the process has ended, or is not visible from here.
        """
        return process_file(self.pid)

    def open(self) -> int:
        """A descriptor of this process for the same file, to read and write.

        Raises:
            OSError: this process has no permission, or the other has ended, or `pid` is another process here.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        # Checked before it is opened: in another pid namespace it may be any file.
        if _inode(os.stat(path)) != self.inode:
            raise FileNotFoundError(f"{path} is another file")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def can_be_shared(self) -> bool:
        """Whether `watch` and `open` work from here."""
        try:
            os.close(self.watch())
            os.close(self.open())
        except OSError:
            return False
        return True


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def discover_hosts(group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """The host of each rank of `group` (default: all ranks), numbered in order of their first ranks.

    Ranks are on one host if they have the same `host_identity` and can open each other's files, as shared memory
    requires. A collective in the first call with a group; later calls return the same result.
    """
    group = group or dist.group.WORLD
    assert group is not None, "the default process group must exist"
    if group not in _hosts:
        _hosts[group] = _discover(group)
    return _hosts[group]


_hosts: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()


def _discover(group: dist.ProcessGroup) -> tuple[int, ...]:
    num_ranks = dist.get_world_size(group)
    identity = host_identity()
    probe = memory_file("fxpar-probe") if sys.platform == "linux" else None
    offered = (identity, None if probe is None else OpenFile.of(probe))
    of_ranks: list[tuple[str, OpenFile | None]] = [offered] * num_ranks
    dist.all_gather_object(of_ranks, offered, group)
    reached = {
        rank
        for rank, (name, file) in enumerate(of_ranks)
        if name == identity and file is not None and file.can_be_shared()
    }
    reached_by = [reached] * num_ranks
    dist.all_gather_object(reached_by, reached, group)
    if probe is not None:
        os.close(probe)  # all ranks have tried to open it: the second all-gather is done
    return group_hosts(reached_by)


def group_hosts(reached_by: Sequence[set[int]]) -> tuple[int, ...]:
    """The host of each rank: a rank joins the first host where it and all members can reach each other.

    reached_by: for each rank, the ranks whose memory it can open.
    """
    hosts: list[list[int]] = []
    number = []
    for rank, reached in enumerate(reached_by):
        for host, members in enumerate(hosts):
            if all(member in reached and rank in reached_by[member] for member in members):
                members.append(rank)
                number.append(host)
                break
        else:
            number.append(len(hosts))
            hosts.append([rank])
    return tuple(number)
