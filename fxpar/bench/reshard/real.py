"""Resharding on a real network: from one half of the ranks to the other, by all strategies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.bench.reshard.transfers import DTYPE, Measured, TimedTransfer, measured, time_transfers
from fxpar.errors import ReshardError
from fxpar.resharding.plan import make_plan
from fxpar.resharding.strategies import STRATEGIES
from fxpar.resharding.tile import Tile
from fxpar.world.hosts import discover_hosts
from fxpar.world.launch import join_world, run_ranks

SIZES = (1 << 20, 1 << 23, 1 << 26)
"""Bytes: activations of small microbatches, where latency counts, up to large ones, where the network's rate does."""

REPEATS = 5
"""The median of five tolerates two bad ones: others use the network as well, which cannot be detected."""

RANKS_ALONE = 4
"""The fewest with more than one rank in each half."""

GOAL = 1.0


def measure_here(say: Say) -> Iterator[tuple[Row, list[Bar]]]:
    """Measure on the ranks that torchrun started, all of which call this; otherwise on four ranks of this machine.

    The bars are for the largest tensor.

    Raises:
        ReshardError: torchrun started a single rank.
    """
    if dist.is_torchelastic_launched():
        device = join_world()
        say("moving tensors between the halves of this world")
        found = measure_halves(device)
        dist.destroy_process_group()
    else:
        device = torch.device("cpu")
        say(f"moving tensors between {RANKS_ALONE} ranks of this machine")
        found, *_ = run_ranks(RANKS_ALONE, measure_halves, device)
    by_strategy = {each.strategy: each for each in found}  # the largest tensor's come last
    for each in found:
        is_last = each is by_strategy["broadcast"]
        yield row(each, device), list(bars(each, by_strategy["send_recv"])) if is_last else []


def measure_halves(device: torch.device, sizes: Sequence[int] = SIZES) -> list[Measured]:
    """A collective of this world, with tensors of `sizes` bytes on `device`; returns the same on every rank.

    Raises:
        ReshardError: the world has no halves.
    """
    if dist.get_world_size() < 2:
        raise ReshardError("expected 2 ranks or more to move tensors between, but this world has 1: start more")
    transfers = [_transfer(num_bytes, strategy) for num_bytes in sizes for strategy in STRATEGIES]
    own = time_transfers(transfers, device, _meet)
    by_rank = [own] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return measured(transfers, by_rank)


def _transfer(num_bytes: int, strategy: str) -> TimedTransfer:
    """From shards on the first half of the ranks to the whole tensor on each rank of the second half."""
    hosts = discover_hosts()
    middle, size = len(hosts) // 2, num_bytes // DTYPE.itemsize
    source = {rank: Tile((((size * rank // middle, size * (rank + 1) // middle),),)) for rank in range(middle)}
    destination = {rank: Tile((((0, size),),)) for rank in range(middle, len(hosts))}
    plan = make_plan(source, destination, DTYPE.itemsize, hosts, strategy)
    return TimedTransfer(f"{num_bytes} bytes", (size,), source, destination, plan, REPEATS)


def _meet() -> float:
    """Wait for all ranks. Clocks of machines differ: the time of each rank starts when its all-reduce ends."""
    dist.all_reduce(torch.zeros(1))
    return time.monotonic()


def row(each: Measured, device: torch.device) -> Row:
    """The figures of one tensor and strategy."""
    plan = each.transfer.plan
    num_bytes = each.transfer.shape[0] * DTYPE.itemsize
    return {
        "device": device.type,
        "hosts": max(plan.hosts) + 1,
        "ranks": len(plan.hosts),
        "tensor_bytes": num_bytes,
        "strategy": each.strategy,
        "bytes_between_hosts": plan.num_bytes,
        **each.times(),
        "tensor_mb_per_s": num_bytes / each.median_s / 1e6,
    }


def bars(broadcast: Measured, send_recv: Measured) -> Iterator[Bar]:
    """The goal that broadcast takes no longer than send_recv, if it sends fewer bytes between hosts."""
    if broadcast.transfer.plan.num_bytes < send_recv.transfer.plan.num_bytes:
        name = f"{broadcast.transfer.name}: broadcast over send_recv"
        yield at_most(name, broadcast.median_s / send_recv.median_s, GOAL)
