"""How the clocks of hosts differ, by messages there and back (Cristian, "Probabilistic clock synchronization", 1989).

A clock that is read between the sending of a message and the arrival of its answer was read half the round trip after
the sending, give or take that half. So the shortest of several round trips tells most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.world.agreement import of_all_ranks
from fxpar.world.lost_peers import naming_lost_peers

ROUND_TRIPS = 8


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What is to be added to times of a rank's clock to get those of rank 0's; wrong by at most `error_us`."""

    offset_us: float = 0.0
    error_us: float = 0.0


def measure_clock_offsets(hosts: Sequence[int], device_type: str) -> list[ClockOffset]:
    """The offset of every rank's clock; a collective of all ranks. Ranks of one host have one clock.

    Args:
        hosts: the host of every rank.
        device_type: of the tensors that the world's process group sends.

    Raises:
        PeerLostError: another rank has ended.
    """
    leaders = {host: hosts.index(host) for host in sorted(set(hosts)) if host != hosts[0]}
    measured: dict[int, ClockOffset] = {}
    with naming_lost_peers("messages that compare the clocks of hosts"):
        for host, leader in leaders.items():
            if dist.get_rank() == 0:
                measured[host] = _offset_of(leader, device_type)
            elif dist.get_rank() == leader:
                _answer(device_type)
    of_hosts = {hosts[0]: ClockOffset()} | of_all_ranks(measured)[0]
    return [of_hosts[host] for host in hosts]


def _offset_of(rank: int, device_type: str) -> ClockOffset:
    message, found = _message(device_type), []
    for _ in range(ROUND_TRIPS):
        sent_us = 1e6 * time.time()
        dist.send(message, rank)
        dist.recv(message, rank)
        read_us = message.item()
        half_us = (1e6 * time.time() - sent_us) / 2
        found.append(ClockOffset(sent_us + half_us - read_us, half_us))
    return min(found, key=lambda offset: offset.error_us)


def _answer(device_type: str) -> None:
    message = _message(device_type)
    for _ in range(ROUND_TRIPS):
        dist.recv(message, 0)
        message.cpu()  # waits for the device
        message.fill_(1e6 * time.time())
        dist.send(message, 0)


def _message(device_type: str) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device_type)
