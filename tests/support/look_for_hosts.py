"""What ranks do to find which of them share a host; apart from the tests, so that they start without libraries."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch.distributed as dist

from fxpar.world.hosts import discover_hosts

CLONE_NEWNET = 0x40000000


def hosts_when_named(names: Sequence[str | None]) -> tuple[int, ...]:
    """The hosts when FXPAR_HOST has these values."""
    name = names[dist.get_rank()]
    if name is not None:
        os.environ["FXPAR_HOST"] = name
    found = discover_hosts()
    os.environ["FXPAR_HOST"] = "another"
    assert discover_hosts() is found, "discovered once"
    return found


def hosts_of_some(ranks: Sequence[int]) -> tuple[int, ...]:
    """The hosts of a group of some of the ranks; none elsewhere."""
    group = dist.new_group(list(ranks))
    return discover_hosts(group) if dist.get_rank() in ranks else ()


def hosts_in_namespaces(alone: Sequence[int]) -> tuple[int, ...] | None:
    """The hosts when the ranks `alone` have a network namespace each; None where the kernel refuses them."""
    refused = dist.get_rank() in alone and ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0
    refusals = [False] * dist.get_world_size()
    dist.all_gather_object(refusals, refused)
    return None if any(refusals) else discover_hosts()
