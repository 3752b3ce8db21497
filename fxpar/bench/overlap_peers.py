"""PyTorch's own ways to split a batch over ranks: DDP, which keeps weights whole, and FSDP2, which shards them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxpar.bench.turns import Step


def data_parallel_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Step:
    """A step of DDP over all ranks, on this rank's part of the batch."""
    return partial(_step, DistributedDataParallel(model), batch)


def fully_sharded_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Step:
    """A step of FSDP2 over all ranks, on this rank's part of the batch; every layer is gathered for itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return partial(_step, model, batch)


def _step(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    model.zero_grad()
    model(**batch).backward()
