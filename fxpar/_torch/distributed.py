"""The private PyTorch names behind process groups, DTensor and checkpoints."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed._functional_collectives  # registers the fake implementations of the collective ops
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    Store,
    Work,
    _register_work,
    _resolve_process_group,
)
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory as SymmetricMemory
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

D = TypeVar("D", bound=DTensor)

c10d_functional = torch.ops._c10d_functional
"""The functional collectives: each returns a tensor that is ready after `wait_tensor`."""

GLOO_THREAD_NAME = "pt_gloo_runloop"
"""What Linux calls the threads that run the collectives of ProcessGroupGloo."""

__all__ = [
    "GLOO_THREAD_NAME",
    "HashStore",
    "PrefixStore",
    "Store",
    "StridedShard",
    "SymmetricMemory",
    "Work",
    "abort_all_groups",
    "as_dtensor_subclass",
    "bypass_in_get_state_dict",
    "c10d_functional",
    "device_mesh_without_groups",
    "have_fake_process_groups",
    "is_connection_error",
    "join_imagined_world",
    "load_empty_groups",
    "piece_of",
    "pipeline_schedule_of_csv",
    "pipelined_all_gather_matmul",
    "pipelined_matmul_reduce_scatter",
    "process_group_named",
    "register_work",
    "reserved_processors",
    "sharable_memory",
    "symmetric_memory",
    "wait_for_collectives",
    "world_store",
    "wrap_pieces",
]


def is_connection_error(error: RuntimeError) -> bool:
    """Whether `error`, of c10d or of gloo under it, means a broken connection or a timeout."""
    # Gloo's errors can only be told from others by the source path in their text.
    return isinstance(error, torch.distributed.DistError) or "/gloo/transport/" in str(error)


def _redistribute_every_strided_shard() -> None:
    """Let torch 2.11 redistribute strided shards that stand for no order of axes, as later releases do.

    It takes each for such an order, and raises a ValueError at three packed matrices that are split in two.
    """
    normalised = DTensorSpec._normalize_placements_into_shard_order

    def as_they_are_at_worst(placements: Any, mesh: DeviceMesh, use_strided_shard_as_shard_order: bool = True) -> Any:
        try:
            return normalised(placements, mesh, use_strided_shard_as_shard_order)
        except ValueError:
            return normalised(placements, mesh, False)

    DTensorSpec._normalize_placements_into_shard_order = staticmethod(as_they_are_at_worst)  # type: ignore[method-assign]


if torch.__version__ < "2.12":
    _redistribute_every_strided_shard()


def piece_of(tensor: DTensor) -> Tensor:
    """What this rank holds of it, itself. `to_local` makes a view of it, which takes microseconds."""
    return tensor._local_tensor


def wrap_pieces(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Callable[[Tensor], DTensor]:
    """Makes DTensors as `DTensor.from_local` does, of this rank's pieces, in a tenth of its time: all share one spec.

    Without autograd and without checks. This rank must be part of `mesh`.
    """
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))

    def wrap(piece: Tensor) -> DTensor:
        return DTensor(piece, spec, requires_grad=False)

    return wrap


def process_group_named(name: str) -> ProcessGroup:
    """The group that functional collectives know by `name`.

    Raises:
        RuntimeError: there is none.
    """
    return _resolve_process_group(GroupName(name))


def wait_for_collectives() -> None:
    """Wait until all that this rank has queued on NCCL is over, as NCCL's watchdog sees it: without calls of CUDA.

    Queries of events from here could hang while another thread waits for the device.
    """
    for group in list(torch.distributed.distributed_c10d._world.pg_names):
        with suppress(RuntimeError):  # other backends do not know what is under way
            group._wait_for_pending_works()


def abort_all_groups() -> None:
    """Abort the communicators of all groups: their kernels on the device end, and what they received is undefined.

    Later collectives raise DistBackendError. The groups stay registered, so `destroy_process_group` can follow. Aborts
    run side by side: an abort may wait for the whole device, and so for the kernels of groups that are still to be
    aborted (pytorch #119797, nccl #1013). `_abort_process_group` of torch 2.13 runs them one after another, each in a
    thread of its own, where its NCCL group call has no effect.
    """

    def abort(group: ProcessGroup) -> None:
        with suppress(RuntimeError):  # it took longer than the group's timeout
            group.abort()

    threads = [
        Thread(target=abort, args=[group], name="abort of a process group", daemon=True)
        for group in list(torch.distributed.distributed_c10d._world.pg_names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def register_work(result: Tensor, work: Work) -> None:
    """Let `wait_tensor(result)` wait for `work`, as it does for functional collectives."""
    _register_work(result, work)


def as_dtensor_subclass(cls: type[D], tensor: DTensor) -> D:
    """A DTensor of the subclass `cls` with the local tensor, mesh and placements of `tensor`; it requires no grad."""
    made: D = cls(tensor._local_tensor, tensor._spec, requires_grad=False)
    return made


def device_mesh_without_groups(device_type: str, ranks: Tensor, axes: Sequence[str]) -> DeviceMesh:
    """A DeviceMesh without process groups, for ranks that this process does not communicate with through it."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes), _init_backend=False)


def world_store() -> Store | None:
    """The store of the default process group; None if this process has no other real ranks."""
    dist = torch.distributed
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    store: Store = _get_default_store()
    return store


# The functions below import inside their bodies: these modules take seconds to import, and are not always needed.


def sharable_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of a GPU that `symmetric_memory` can share: uint8 (num_bytes,).

    Raises:
        RuntimeError: the device has less free memory, or PyTorch cannot share its memory.
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)


def reserved_processors() -> int:
    """How many multiprocessors matmuls leave to communication: what `torch._C._set_sm_carveout_experimental` set."""
    return torch._C._get_sm_carveout_experimental() or 0


def symmetric_memory(memory: Tensor, group: ProcessGroup) -> "SymmetricMemory":
    """Share the `memory` of every rank of `group`, GPUs of one host, so that all can read and write it. A collective.

    The mapping lives as long as the returned object, or a tensor that its `get_buffer` returned.
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(memory, group)


def pipelined_all_gather_matmul(
    shard: Tensor, others: Sequence[Tensor], group_name: str, *, keeps_gathered: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """The rows of all ranks' `shard`, if wanted, and their products with each of `others`, overlapped with copies."""
    import torch.distributed._symmetric_memory

    op = torch.ops.symm_mem.fused_all_gather_matmul
    gathered, products = op(shard, list(others), 0, group_name, return_A=keeps_gathered)
    return gathered if keeps_gathered else None, products


def pipelined_matmul_reduce_scatter(left: Tensor, right: Tensor, group_name: str) -> Tensor:
    """This rank's rows of the sum of all ranks' `left @ right`, overlapped with copies."""
    import torch.distributed._symmetric_memory

    found: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(left, right, "sum", 0, group_name)
    return found


def pipeline_schedule_of_csv(
    path: Path, stage: "PipelineStage", microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> "PipelineScheduleMulti":
    """A torch.distributed.pipelining schedule from a CSV file of computations ("compute_only"); torch adds messages.

    `loss(output, target)` returns what a microbatch adds to the loss, from the output of the last stage and a target.
    """
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime([stage], microbatches, loss_fn=loss, scale_grads=False)
    schedule._load_csv(str(path), format="compute_only")
    return schedule


def bypass_in_get_state_dict(
    optimizer: torch.optim.Optimizer, state_dict: Callable[[], dict[str, Any]], equal: Callable[[], dict[str, Any]]
) -> None:
    """Replace `optimizer.state_dict` by `state_dict`, but let torch's `get_state_dict` still call that of the class.

    `equal` compares equal to `state_dict`: torch keeps it in a set for ever, to recognise patched state dicts.
    """
    from torch.distributed.checkpoint.state_dict import _patched_state_dict

    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    _patched_state_dict.add(equal)


def load_empty_groups(is_ours: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Let `set_state_dict` load groups without a parameter on this rank, for optimizers for which `is_ours` is true.

    torch finds the group to load by its parameters, and refuses a group that has none here but some on other ranks.
    """
    from torch.distributed.checkpoint import state_dict as module

    split = module._split_optim_state_dict

    def split_with_empty_groups(model: nn.Module, optimizer: Any, loaded: dict[str, Any], info: Any) -> dict[str, Any]:
        filled = [group for group in optimizer.param_groups if group["params"]]
        groups = loaded["param_groups"]
        if len(filled) == len(groups) or len(optimizer.param_groups) != len(groups) or not is_ours(optimizer):
            return split(model, optimizer, loaded, info)
        of_filled_groups: Any = SimpleNamespace(param_groups=filled)
        found = split(model, of_filled_groups, loaded, info)
        if found is loaded:  # without states, such as SGD's without momentum, torch returns its argument
            return loaded
        left = iter(found["param_groups"])
        pairs = zip(optimizer.param_groups, groups, strict=True)
        whole = [next(left) if own["params"] else {**given, "params": []} for own, given in pairs]
        return {**found, "param_groups": whole}

    module._split_optim_state_dict = split_with_empty_groups  # type: ignore[assignment]


def have_fake_process_groups() -> None:
    """Register the backend "fake" for process groups: its collectives return at once and do nothing."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers it


def join_imagined_world(num_ranks: int) -> None:
    """Become rank 0 of a fake world of `num_ranks`: process groups can be made, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
