"""PyTorch's own data parallelism, tuned: DDP with several bucket sizes, FSDP2 with and without resharding.

The best setting depends on model and network, so all of them are timed in turns, and the fastest is the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxpar.bench.measure.interleaved import Step, Timing, median_ms

DDP, FSDP2 = "DDP", "FSDP2"

Build: TypeAlias = Callable[[], nn.Module]
Batch: TypeAlias = Mapping[str, Tensor]

_DEFAULT_BUCKETS_MB = 25
"""The default of DDP, with which the first bucket has 1 MB."""

_BUCKETS_PER_MODEL = (2, 4, 8)
"""From half of the gradients, whose reduction overlaps with half of the backward, to single layers of the models here,
which have four and six. Smaller buckets would change nothing, since a weight is never divided."""


def data_parallel_steps(build: Build, batch: Batch) -> dict[str, Step]:
    """A step of DDP over all ranks for each size of buckets, on this rank's part of the batch."""
    megabytes = sum(parameter.nbytes for parameter in build().parameters()) / 2**20
    caps = [_DEFAULT_BUCKETS_MB, *(megabytes / count for count in _BUCKETS_PER_MODEL)]
    return {f"{DDP}, buckets of {cap:.3g} MB": data_parallel_step(build(), batch, cap) for cap in caps}


def data_parallel_step(model: nn.Module, batch: Batch, bucket_cap_mb: float) -> Step:
    """A step of DDP with buckets of that size; gradients are views of buckets, so that none is copied."""
    cap: Any = None if bucket_cap_mb == _DEFAULT_BUCKETS_MB else bucket_cap_mb  # annotated int, fractions work as well
    return partial(_step, DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True), batch)


def fully_sharded_steps(build: Build, batch: Batch, layers: str) -> dict[str, Step]:
    """A step of FSDP2 over all ranks that gathers weights again in the backward, and one that keeps them."""
    return {
        f"{FSDP2}, weights gathered again": fully_sharded_step(build(), batch, layers, reshard_after_forward=True),
        f"{FSDP2}, weights kept": fully_sharded_step(build(), batch, layers, reshard_after_forward=False),
    }


def fully_sharded_step(model: nn.Module, batch: Batch, layers: str, *, reshard_after_forward: bool) -> Step:
    """A step of FSDP2, which gathers each child of the module at path `layers` on its own, and the rest as one unit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule(layers).children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return partial(_step, model, batch)


def best_of(peer: str, timings: Mapping[str, Sequence[Timing]]) -> str:
    """The name of the fastest setting of DDP or FSDP2, by the medians."""
    settings = [name for name in timings if name.startswith(f"{peer}, ")]
    return min(settings, key=lambda name: median_ms(timings[name]))


def _step(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    model(**batch).backward()
