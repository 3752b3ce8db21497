"""What ranks of tests run: collectives timed as if they were on other hosts, or on emulated ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpar.calibrate.network import TimedCollective, time_collectives
from fxpar.world.hosts import discover_hosts


def time_groups(sizes: Sequence[int], hosts: Sequence[int] | None = None) -> list[TimedCollective]:
    """Collectives of `sizes` bytes inside and between `hosts`, by default where ranks are."""
    return time_collectives(hosts or discover_hosts(), torch.device("cpu"), sizes, repeats=3)
