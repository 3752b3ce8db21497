"""Every private PyTorch name that fxpar uses, as of torch 2.13; a new release may need changes here."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch._dynamo
import torch.distributed._functional_collectives  # registers the fake implementations of the collective ops
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    Store,
    Work,
    _register_work,
    _resolve_process_group,
)
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory as SymmetricMemory
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=DTensor)

c10d_functional = torch.ops._c10d_functional
"""The functional collectives: each returns a tensor that is ready after `wait_tensor`."""

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HashStore",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "PrefixStore",
    "ShapeEnv",
    "Store",
    "StridedShard",
    "SymmetricMemory",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TracingContext",
    "Work",
    "abort_all_groups",
    "add_to_each",
    "aot_export_joint_with_descriptors",
    "as_dtensor_subclass",
    "bypass_in_get_state_dict",
    "c10d_functional",
    "compile_options",
    "compile_single_device",
    "device_mesh_without_groups",
    "graph_arguments",
    "have_fake_process_groups",
    "ignore_logging_calls",
    "inductor_cache",
    "inductor_compile",
    "inductor_decompositions",
    "is_connection_error",
    "is_shared",
    "join_imagined_world",
    "leave_out_of_state_dict",
    "load_empty_groups",
    "make_fx",
    "mark_static",
    "never_compiled",
    "pipeline_schedule_of_csv",
    "pipelined_all_gather_matmul",
    "pipelined_matmul_reduce_scatter",
    "process_group_named",
    "recompile_limit",
    "register_work",
    "rename_placeholder",
    "reserved_processors",
    "schema",
    "sharable_memory",
    "skip_frame",
    "stored_outside",
    "symmetric_memory",
    "tag_activation_checkpoint",
    "tracing",
    "wait_for_collectives",
    "with_effects",
    "world_store",
]


def is_shared(tensor: Tensor) -> bool:
    """Whether anything but `tensor` itself holds its storage: a view, an autograd graph, a message in flight."""
    storage = tensor.untyped_storage()
    held_here = 2  # by the tensor, and by `storage`
    return bool(torch._C._storage_Use_Count(storage._cdata) > held_here)


def is_connection_error(error: RuntimeError) -> bool:
    """Whether `error`, of c10d or of gloo under it, means a broken connection or a timeout."""
    # Gloo's errors can only be told from others by the source path in their text.
    return isinstance(error, torch.distributed.DistError) or "/gloo/transport/" in str(error)


def ignore_logging_calls() -> None:
    """Let Dynamo trace past calls of loggers, which would break the graph (libraries add methods to `Logger`, too)."""
    methods = [method for name, method in vars(logging.Logger).items() if callable(method) and not name.startswith("_")]
    torch._dynamo.config.ignore_logging_functions.update(methods)


def skip_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` itself runs as plain Python; Dynamo still compiles the functions that it calls."""
    skipped: Callable[..., Any] = torch._dynamo.disable(function, recursive=False)
    return skipped


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, and everything that it calls, always runs as plain Python."""
    disabled: Callable[P, T] = torch._dynamo.disable(function)
    return disabled


def recompile_limit() -> int:
    """How many times Dynamo compiles one function before it falls back to plain Python."""
    config = torch._dynamo.config
    return int(min(config.recompile_limit, config.accumulated_recompile_limit))


def mark_static(tensor: torch.Tensor) -> None:
    """Make Dynamo compile anew for another shape of this argument rather than trace symbolic sizes."""
    torch._dynamo.mark_static(tensor)


def stored_outside() -> dict[fx.Node, str]:
    """The values that objects outside of the graph will refer to after the call, with a description of the reference.

    To be called while Dynamo calls the backend.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import TensorVariable, VariableTracker
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    found: dict[fx.Node, str] = {}

    def note(values: Any, how: str) -> None:
        def note_tensor(variable: VariableTracker) -> None:
            if isinstance(variable, TensorVariable):
                found[variable.as_proxy().node] = how

        VariableTracker.visit(note_tensor, values)

    for changed, attributes in effects.store_attr_mutations.items():
        if isinstance(changed.mutation_type, AttributeMutationExisting):
            for name, stored in attributes.items():
                note(stored, f"attribute {name!r}")
    for changed in effects.id_to_variable.values():
        if isinstance(changed.mutation_type, ValueMutationExisting) and effects.is_modified(changed):
            note(getattr(changed, "items", ()), "an item")
    return found


def compile_options(backend: Callable[..., Any]) -> Mapping[str, Any] | None:
    """The options of the innermost `torch.compile` under which Python runs, if that has this backend and no mode."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import innermost_backend

    callback: Any = get_eval_frame_callback()
    asked: Any = innermost_backend(callback)
    if getattr(asked, "compiler_fn", None) is not backend or not asked.kwargs.keys() <= {"options"}:
        return None
    options: Mapping[str, Any] = asked.kwargs.get("options", {})
    return options


def compile_single_device(
    module: fx.GraphModule, example_inputs: Sequence[Tensor], lowering: str
) -> Callable[..., Any]:
    """Dynamo's graph compiled for one device: by Inductor, or else by the backend "aot_eager"."""
    backend = torch._dynamo.lookup_backend("inductor" if lowering == "inductor" else "aot_eager")
    compiled: Callable[..., Any] = backend(module, list(example_inputs))
    return compiled


def add_to_each(totals: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Add to many tensors in place, in one call."""
    torch._foreach_add_(list(totals), list(terms))


def schema(op: torch._ops.OpOverload) -> torch._C.FunctionSchema:
    """The parameters and results of an op, as declared."""
    return op._schema


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


def inductor_cache() -> Path:
    """Inductor's cache folder, which all processes of this user on this machine share."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decomposition table. Random ops are not decomposed, so they draw the same numbers as ATen."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        table: dict[Any, Callable[..., Any]] = select_decomp_table()
    return table


def inductor_compile(
    graph: fx.GraphModule, inputs: Sequence[Tensor], *, backward: bool, caches: bool
) -> Callable[[list[Tensor]], Sequence[Any]]:
    """Inductor's code for a decomposed graph. It empties its list of arguments; outputs keep the graph's strides.

    It is looked up in Inductor's cache of graphs, and put there, if `caches`, and if that cache is turned on.

    Must be called inside `tracing(TracingContext(mode))`, with the fake mode of the inputs.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    output = graph.graph.output_node()
    (results,) = output.args
    assert isinstance(results, tuple | list), "Inductor compiles graphs that return a sequence"
    # Inductor keeps the strides of outputs that are visible to users; it may choose those of others.
    output.meta["user_visible_output_idxs"] = [i for i, found in enumerate(results) if isinstance(found, fx.Node)]
    with config.patch(fallback_random=True, fx_graph_cache=caches and config.fx_graph_cache):
        compiled: Callable[[list[Tensor]], Sequence[Any]] = compile_fx_inner(
            graph, inputs, cudagraphs=BoxedBool(False), is_backward=backward
        )
    return compiled


def graph_arguments(module: fx.GraphModule) -> list[Any]:
    """The example value of each placeholder, in order; to be called while the backend compiles `module`."""
    return [node.meta["grapharg"].example for node in module.graph.find_nodes(op="placeholder")]


def leave_out_of_state_dict(module: nn.Module, buffer: str) -> None:
    """Make the buffer of that name non-persistent: `module` neither saves nor loads it."""
    module._non_persistent_buffers_set.add(buffer)


def rename_placeholder(node: fx.Node, name: str) -> None:
    """Rename a placeholder; fx appends a suffix if the name is taken."""
    node._rename(name)
    node.target = node.name


def have_fake_process_groups() -> None:
    """Register the backend "fake" for process groups: its collectives return at once and do nothing."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers it


def join_imagined_world(num_ranks: int) -> None:
    """Become rank 0 of a fake world of `num_ranks`: process groups can be made, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)


def world_store() -> Store | None:
    """The store of the default process group; None if this process has no other real ranks."""
    dist = torch.distributed
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    store: Store = _get_default_store()
    return store
