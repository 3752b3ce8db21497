"""Make a distributed model trace as the single-device program that it was written as, with full-size parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import never_compiled, recompile_limit, skip_frame, uncompiled
from fxpar._torch.dynamo.traced_property import PARAMETER_NAMES
from fxpar.errors import (
    AlreadyDistributedError,
    CompiledTooEarlyError,
    ForwardRaisesError,
    FxparError,
    GraphBreakError,
    NotCompiledError,
    RecompileLimitError,
    ReplacedForwardError,
    UnsupportedGraphError,
)
from fxpar.ir.failed_trace import error_of_failed_trace
from fxpar.ir.markers import PLAIN, shard
from fxpar.ir.trace_forward import TraceApartError
from fxpar.model.arguments import count_microbatches, prepare_arguments, split_dim
from fxpar.model.changing_numbers import ChangingNumbers, Number
from fxpar.model.checked_conversions import CHECKED_CONVERSIONS
from fxpar.model.distribution import Distribution
from fxpar.model.logical_properties import logical_properties
from fxpar.model.mixed_precision import compute_dtypes, converting_forward
from fxpar.model.module_hooks import ModuleHooks, never_compile_hooks
from fxpar.model.named_loss import named_loss
from fxpar.model.one_process_methods import refused_methods
from fxpar.model.outputs import map_tensors
from fxpar.model.recording_hooks import install_recording_hooks
from fxpar.model.recurrent import RECURRENT_MEMBERS
from fxpar.model.sync_batch_norm import synchronized_forward
from fxpar.model.unfrozen import train_unfrozen
from fxpar.model.unset import check_loaded
from fxpar.world.mesh import num_batch_shards

_MARK = "_fxpar_distributed"

_OWN_FORWARD = "_fxpar_own_forward"
"""The attribute that keeps the forward of a module that has one of its own, as after `module.forward = f`."""


def refuse_distributed(model: nn.Module) -> None:
    """Let a model be distributed once, and each of its modules in one model alone.

    Raises:
        AlreadyDistributedError: a module of `model` belongs to a distributed model, which may be another one.
        CompiledTooEarlyError: it is compiled already.
    """
    if (plain := uncompiled(model)) is not model:
        raise CompiledTooEarlyError(type(plain).__name__)
    for name, module in model.named_modules():
        if hasattr(type(module), _MARK):
            raise AlreadyDistributedError(type(model).__name__, name)


def install(distribution: Distribution) -> None:
    """Set the class of each module to a subclass of the same name, whose parameters read as logical ones in a trace.

    The root's forward is wrapped in `enter` and `exit` markers; the output of a hinted module is marked, too. In mixed
    precision, modules convert their arguments. A deep copy of a distributed model is given classes of its own.
    """
    names = _take_back(distribution.model)
    # One function for equal layers, which Dynamo then knows to be equal.
    hinted_forward, in_dtype = cache(_hinted_forward), cache(converting_forward)
    dtypes = {} if distribution.precision is None else compute_dtypes(distribution.parameters)
    members: dict[nn.Module, dict[str, Any]] = {module: {} for module in distribution.model.modules()}
    for parameter in distribution.parameters.values():
        for module, attribute, read in logical_properties(parameter, distribution):
            members[module][attribute] = read
            members[module] |= {**CHECKED_CONVERSIONS, PARAMETER_NAMES: names.get(module, tuple(module._parameters))}
    for path, module in distribution.model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            members[module]["forward"] = synchronized_forward(module, path, num_batch_shards(distribution.mesh))
        if isinstance(module, nn.RNNBase):
            members[module] |= RECURRENT_MEMBERS
            vars(module).pop("_flat_weights", None)
        if path in distribution.hints.outputs:
            plain = members[module].get("forward") or _forward_of(module)
            members[module]["forward"] = hinted_forward(plain, tuple(distribution.hints.outputs[path]))
        if module in dtypes:
            plain = members[module].get("forward") or _forward_of(module)
            members[module]["forward"] = in_dtype(plain, dtypes[module])
        members[module] |= refused_methods(type(module))
    root = distribution.model
    inner = members[root].get("forward") or _forward_of(root)
    members[root] |= {
        "forward": _forward_by_shapes(inner, distribution),
        "__call__": _checked_call(distribution),
    }
    for module, namespace in members.items():
        cls = type(module)
        if namespace:
            module.__class__ = type(cls.__name__, (cls,), {**namespace, _MARK: True, "__module__": cls.__module__})


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module as a function of `self`: that of its class, or its own one, which would hide others."""
    if "forward" in vars(module):
        vars(module)[_OWN_FORWARD] = vars(module).pop("forward")
    return _own_forward if _OWN_FORWARD in vars(module) else type(module).forward


def _own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, _OWN_FORWARD)(*args, **kwargs)


def _signature(model: nn.Module, inner: Callable[..., Any]) -> inspect.Signature:
    """That of the forward of `model`, with `self`."""
    if _OWN_FORWARD not in vars(model):
        return inspect.signature(inner)
    own = inspect.signature(getattr(model, _OWN_FORWARD))
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    others = [each for each in own.parameters.values() if each.name != "self"]
    return own.replace(parameters=[first, *others])


def _take_back(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Give modules the classes that they had before `install`; returns the names of the parameters that they had then.

    Those of other stages are gone from the modules themselves.
    """
    names = {}
    for module in model.modules():
        cls = type(module)
        if _MARK in vars(cls):
            names[module] = vars(cls).get(PARAMETER_NAMES, ())
            module.__class__ = cls.__mro__[1]
    return names


def _hinted_forward(plain: Callable[..., Any], spec: tuple[Any, ...]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if isinstance(output, tuple):
            return (shard(output[0], spec), *output[1:])
        return shard(output, spec)

    return forward


def _logical_forward(inner: Callable[..., Any], distribution: Distribution) -> FunctionType:
    """The model's forward between markers: its inputs are those of a batch shard, and it computes one microbatch."""
    wanted, handle, batch_dims = distribution.microbatches, distribution.handle, distribution.batch_dims

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise RecompileLimitError(recompile_limit()) if distribution.tracer.is_called else NotCompiledError
        leaves, structure = pytree.tree_flatten((args, kwargs))
        dims = split_dim(args, kwargs, batch_dims)
        microbatches = count_microbatches(leaves, dims, wanted)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[i] = torch.ops.fxpar.enter(leaf, microbatches, PLAIN if dims[i] is None else dims[i], i, handle)
            elif isinstance(leaf, Number):
                leaves[i] = torch.ops.fxpar.enter(leaf.tensor, microbatches, PLAIN, i, handle).item()
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        output = inner(self, *args, **kwargs)
        loss = named_loss(output)
        return map_tensors(lambda result: torch.ops.fxpar.exit(result, result is loss, handle), output)

    assert isinstance(forward, FunctionType)
    return forward


def _forward_by_shapes(inner: Callable[..., Any], distribution: Distribution) -> Callable[..., Any]:
    """A forward with the signature of `inner` that calls a copy of the logical one for each combination of shapes.

    There are others for other hooks of modules, and where more parameters are trained: Dynamo guards neither.

    Numbers that change from call to call are traced as tensors, where the forward does without their values.

    Dynamo keeps traces by code object, and gives up on one that it has traced some times: so shapes never end a
    training. What has to be traced without grad has copies of its own, too: Dynamo also gives up on one that it failed
    to trace. So a copy whose trace failed is not used again, but its error tells why.
    """
    traced, tracer = _logical_forward(inner, distribution), distribution.tracer
    copies: dict[Hashable, FunctionType] = {}
    changing, copy_numbers = ChangingNumbers(distribution.mesh.device_type), count()
    hooks = ModuleHooks(distribution.model)
    traced_apart: set[Hashable] = set()

    @never_compiled
    def copy_for(key: Hashable) -> FunctionType:
        if key not in copies:
            copies[key] = _with_own_code(traced, f"forward_{distribution.handle}_{next(copy_numbers)}")
        return copies[key]

    @never_compiled
    def drop_failed(key: Hashable, error: BaseException | None) -> FxparError | None:
        """Why the copy was traced in vain; None if it was not."""
        failure = error if isinstance(error, GraphBreakError) else error_of_failed_trace(copies[key])
        if failure is not None:
            del copies[key]
        return failure

    @skip_frame
    def call(self: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[int]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
        called = hooks.registered(), distribution.num_unfrozen, *numbers, *shapes
        if tracer.is_called and not torch.is_grad_enabled() and called not in traced_apart:
            try:
                return tracer.evaluate(copy_for((called, True)), self, *args, **kwargs)
            except TraceApartError as error:  # the call below is not made here, so that its error does not tell of this
                if drop_failed((called, True), error.__cause__) is not None:
                    traced_apart.add(called)
        key = called, torch.is_grad_enabled()
        try:
            return copy_for(key)(self, *args, **kwargs)
        except (GraphBreakError, NotCompiledError) as error:
            raise drop_failed(key, error) or error from None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tracer.requested is not None:  # else the model is called by the tracer
            raise CompiledTooEarlyError(type(self).__name__)
        while True:
            given, named, numbers = changing.as_tensors(args, kwargs)
            try:
                output = call(self, given, named, numbers)
            except (GraphBreakError, UnsupportedGraphError, ForwardRaisesError):
                if not changing.give_up(numbers):
                    raise
            else:
                changing.note_traced(numbers)
                return output

    # Trainers look up which arguments the model takes.
    forward.__signature__ = _signature(distribution.model, inner)  # type: ignore[attr-defined]
    return skip_frame(forward)


def _with_own_code(function: FunctionType, name: str) -> FunctionType:
    """A copy of the function with a code object of its own, which equals no other: code objects equal by content."""
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _checked_call(distribution: Distribution) -> Callable[..., Any]:
    """A `__call__` that runs in plain Python, before Dynamo sees the arguments.

    Under `torch.compile(backend="fxpar")` it hands them to the model's own tracer, from which it is called once more;
    then it checks and localises them. If the forward does not trace, it may for want of hooks of transformers.
    """
    base = type(distribution.model).__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (options := distribution.tracer.requested) is not None:
            train_unfrozen(distribution)
            return distribution.tracer.run(options, args, kwargs)
        check_loaded(distribution)
        never_compile_hooks(self)
        args, kwargs = prepare_arguments(args, kwargs, distribution)
        try:
            return base(self, *args, **kwargs)
        except (ForwardRaisesError, GraphBreakError):
            if not install_recording_hooks(self):
                raise
        except UnsupportedGraphError as error:
            if "forward" in vars(self):
                raise ReplacedForwardError(type(self).__name__) from error
            raise
        return base(self, *args, **kwargs)

    return skip_frame(call)
