"""The private PyTorch names behind Dynamo, AOTAutograd, FX and Inductor."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.funcname_cache import get_funcname
from torch._dynamo.utils import get_compilation_metrics
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.eager_transforms import _set_tensor_requires_grad
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
T = TypeVar("T")

assert_async = torch._assert_async
"""Raises if a tensor of one element is false, with a message; on a GPU without waiting for it."""

sym_sqrt: Callable[..., Any] = torch._sym_sqrt  # type: ignore[attr-defined]
"""What Dynamo writes for `math.sqrt` of a number that a tensor holds."""

traced_torch_tensor: Callable[..., Any] = torch._refs.tensor
"""What Dynamo writes for `torch.tensor` of such a number."""

set_tensor_requires_grad = _set_tensor_requires_grad
"""What `torch.func.grad` calls for its argument in a trace; what follows reads the argument, not what it returns."""

get_data: Callable[[Tensor], Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
"""What Dynamo writes for `tensor.data`."""

set_inplace_requires_grad_allowed = torch._C._functorch.set_inplace_requires_grad_allowed
"""What Dynamo writes around a `requires_grad_()` that it traces."""

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TracingContext",
    "add_to_each",
    "aot_export_joint_with_descriptors",
    "assert_async",
    "bare_traces",
    "compile_options",
    "compile_single_device",
    "failed_trace",
    "fake_tensor",
    "get_data",
    "graph_arguments",
    "ignore_logging_calls",
    "inductor_cache",
    "inductor_compile",
    "inductor_decompositions",
    "is_in_state_dict",
    "is_shared",
    "leave_out_of_state_dict",
    "make_fx",
    "mark_static",
    "name_functions_for_logs_alone",
    "never_compiled",
    "recompile_limit",
    "rename_placeholder",
    "schema",
    "set_inplace_requires_grad_allowed",
    "set_tensor_requires_grad",
    "skip_frame",
    "storage_of",
    "sym_sqrt",
    "tag_activation_checkpoint",
    "traced_torch_tensor",
    "tracing",
    "uncompiled",
    "wider_tracing",
    "with_effects",
]


def fake_tensor(
    mode: FakeTensorMode,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    device: torch.device,
    *,
    requires_grad: bool = False,
) -> Tensor:
    """A fake tensor of a memory of its own, in a tenth of the time that `torch.empty_strided` takes under the mode."""
    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad)
    return FakeTensor(mode, meta, device)


def is_shared(tensor: Tensor) -> bool:
    """Whether anything but `tensor` itself holds its storage: a view, an autograd graph, a message in flight."""
    storage = tensor.untyped_storage()
    held_here = 2  # by the tensor, and by `storage`
    return bool(torch._C._storage_Use_Count(storage._cdata) > held_here)


def storage_of(tensor: Tensor) -> int:
    """Identifies the storage of `tensor`, or of what `torch.vmap` has wrapped, as long as that lives."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


def ignore_logging_calls() -> None:
    """Let Dynamo trace past warnings and calls of loggers, which would break the graph (libraries add methods, too)."""
    methods = [method for name, method in vars(logging.Logger).items() if callable(method) and not name.startswith("_")]
    functions = [getattr(logging, method.__name__) for method in methods if hasattr(logging, method.__name__)]
    torch._dynamo.config.ignore_logging_functions.update([*methods, *functions, warnings.warn])
    if torch.__version__ < "2.12":  # which would write these functions into its own log, and prints that it cannot
        torch._dynamo.utils._get_dynamo_config_for_logging = lambda: None


def name_functions_for_logs_alone() -> None:
    """Let Dynamo find out which function a line is in only for a log that was asked for, and not for every op.

    It reads all of a file for that, which takes a tenth of the first trace in a process.
    """
    vars(torch._dynamo.symbolic_convert)["get_funcname"] = _function_if_logged


def _function_if_logged(filename: str, lineno: int) -> str | None:
    is_logged: Callable[[str], bool] = torch._logging._internal.log_state.is_artifact_enabled
    return get_funcname(filename, lineno) if is_logged("trace_call") or is_logged("trace_source") else None


@contextmanager
def bare_traces() -> Iterator[None]:
    """Within, Dynamo does not run the garbage collector after each trace, nor time its guards for a log.

    It times them with emptied caches of the processor, which takes 50 ms.
    """
    untimed = patch.object(torch._dynamo.guards, "profile_guard_manager", _not_timed)
    with untimed, torch._dynamo.config.patch(run_gc_after_compile=False):
        yield


def _not_timed(*_: Any) -> float:
    return 0.0


_traces_wider: ContextVar[bool] = ContextVar("whether Dynamo traces within `wider_tracing`", default=False)


@contextmanager
def wider_tracing() -> Iterator[None]:
    """Within, Dynamo traces `Tensor.item()`, selections by masks, and recurrent layers, step by step."""
    token = _traces_wider.set(True)
    try:
        with torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, allow_rnn=True
        ):
            yield
    finally:
        _traces_wider.reset(token)


def traces_wider() -> bool:
    """Whether Dynamo traces within `wider_tracing`: other traces are to stay as PyTorch makes them."""
    return _traces_wider.get()


def skip_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` itself runs as plain Python; Dynamo still compiles the functions that it calls."""
    skipped: Callable[..., Any] = torch._dynamo.disable(function, recursive=False)
    return skipped


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, and everything that it calls, always runs as plain Python."""
    disabled: Callable[P, T] = torch._dynamo.disable(function)
    return disabled


def failed_trace(function: FunctionType) -> tuple[str, str] | None:
    """Why Dynamo gave up on tracing `function`, in its own words, and at which line; None if it did not of late.

    It is told by the function's name.
    """
    for metrics in reversed(get_compilation_metrics()):
        if metrics.co_name == function.__code__.co_name and metrics.fail_reason is not None:
            return metrics.fail_reason, f"{metrics.fail_user_frame_filename}:{metrics.fail_user_frame_lineno}"
    return None


def recompile_limit() -> int:
    """How many times Dynamo compiles one function before it falls back to plain Python."""
    config = torch._dynamo.config
    return int(min(config.recompile_limit, config.accumulated_recompile_limit))


def mark_static(tensor: torch.Tensor) -> None:
    """Make Dynamo compile anew for another shape of this argument rather than trace symbolic sizes."""
    torch._dynamo.mark_static(tensor)


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
    """Dynamo's graph compiled for one device: by Inductor, to which "tensorrt" leaves it, or else by "aot_eager"."""
    backend = torch._dynamo.lookup_backend("inductor" if lowering in ("inductor", "tensorrt") else "aot_eager")
    compiled: Callable[..., Any] = backend(module, list(example_inputs))
    return compiled


def add_to_each(totals: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Add to many tensors in place, in one call."""
    torch._foreach_add_(list(totals), list(terms))


def schema(op: torch._ops.OpOverload) -> torch._C.FunctionSchema:
    """The parameters and results of an op, as declared."""
    return op._schema


# The functions below import inside their bodies: these modules take seconds to import, and are not always needed.


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


def is_in_state_dict(module: nn.Module, buffer: str) -> bool:
    """Whether `module` saves and loads the buffer of that name."""
    return buffer not in module._non_persistent_buffers_set


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given if it returned `model`, else `model`."""
    return model._orig_mod if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) else model


def rename_placeholder(node: fx.Node, name: str) -> None:
    """Rename a placeholder; fx appends a suffix if the name is taken."""
    node._rename(name)
    node.target = node.name
