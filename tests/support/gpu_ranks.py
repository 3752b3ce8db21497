"""Ranks over NCCL on the GPUs of this machine, of which several may share one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxpar._torch.distributed import HashStore, PrefixStore, world_store

T = TypeVar("T")


def join_nccl() -> None:
    """Form the world anew over NCCL, each rank on a GPU of its own as long as there are any.

    Convolutions of float32 compute in it, as matmuls do by default: TF32 rounds the sums of microbatches otherwise than
    that of a batch.
    """
    torch.backends.cudnn.allow_tf32 = False
    store, rank, num_ranks = world_store(), dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if num_ranks > torch.cuda.device_count():
        _share_gpus(rank)
    if store is None:
        dist.destroy_process_group()
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        return
    dist.barrier()  # who leaves a world early breaks connections that others are still making
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=PrefixStore("nccl", store), rank=rank, world_size=num_ranks)


def _share_gpus(rank: int) -> None:
    """Let NCCL, and PyTorch's symmetric memory, accept ranks that share a GPU, which then takes turns between them.

    NCCL takes two ranks of a host with one GPU for a mistake. So each is told that it is a host of its own, and what
    they send each other goes through sockets.
    """
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")


def on_gpus(work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` on this rank, in a world over NCCL. For `run_ranks`."""
    join_nccl()
    return work(*args)
