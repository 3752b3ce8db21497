"""Choose the fastest variant of a fused op; all ranks of the group choose the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
import triton
from triton.runtime.errors import OutOfResources

from fxpar._torch.devices import keep_device_busy
from fxpar.lowering.machine_lock import shared_folder
from fxpar.lowering.triton.plan import Fused, How
from fxpar.lowering.triton.tiling import Op, Tiling, tilings
from fxpar.lowering.triton.tuner import Memory, TuningProblem, fastest

_WARM_UP, _REPEATS = 2, 5

_HEAD_START_CYCLES = 2_000_000
"""Of the device, about a millisecond: by then the host has launched all that is timed, as it has amid a step."""


@cache
def memory() -> Memory:
    """The tuning results of this user on this machine, stored in Inductor's cache folder."""
    return Memory(shared_folder() / "fused")


def versions() -> str:
    """The versions of the packages that determine the code of kernels, matmuls and collectives."""
    return f"triton {triton.__version__}, torch {torch.__version__}"


def possible_tilings(op: Op, dtype: torch.dtype, device: torch.device, *, vectors: bool, matrices: int) -> list[Tiling]:
    """The `tilings` for this device whose blocks of the factors fit into the shared memory of a multiprocessor."""
    major, minor = torch.cuda.get_device_capability(device)
    candidates = tilings(op, dtype, 10 * major + minor, vectors=vectors, matrices=matrices)
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return [tiling for tiling in candidates if _block_bytes(tiling, dtype) <= properties["max_shared_mem"]]


def _block_bytes(tiling: Tiling, dtype: torch.dtype) -> int:
    return tiling.stages * (tiling.m + tiling.n) * tiling.k * dtype.itemsize * tiling.programs


def time_us(run: Callable[[], object]) -> float:
    """How long `run` keeps the current stream busy; infinity if the device lacks the memory or registers for it."""
    try:
        for _ in range(_WARM_UP):
            run()
    except (OutOfResources, torch.OutOfMemoryError):  # the other ranks time it, too, and learn of it in the all-reduce
        return math.inf
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        keep_device_busy(_HEAD_START_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def decide(
    problem: TuningProblem,
    possible: Sequence[Tiling],
    ways: Sequence[Fused],
    run: Callable[[How], object],
    reset: Callable[[], None],
    group: dist.ProcessGroup,
    device: torch.device,
) -> How:
    """The fastest variant of `run`: all ranks time it together, unless the first rank has a stored result.

    reset: called on all ranks if a kernel could not be launched on one of them, so that signals are missing.
    """
    (known,) = _of_first_rank([memory().recall(problem)], group, device)
    if known is not None:
        return known

    def slowest_us(how: How) -> float:
        found = torch.tensor([time_us(lambda: run(how))], dtype=torch.float64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        if math.isinf(found):
            reset()
        return float(found)

    how, best_us = fastest(possible, ways, slowest_us, has_pipelined=problem.has_pipelined)
    memory().keep(problem, how, best_us)
    return how


def _of_first_rank(found: list[How | None], group: dist.ProcessGroup, device: torch.device) -> list[How | None]:
    dist.broadcast_object_list(found, group=group, group_src=0, device=device)
    return found
