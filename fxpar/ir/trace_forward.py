"""Trace the forward of a model with Dynamo, once for all that ask: `distribute`, and every `torch.compile`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import bare_traces, compile_options, never_compiled, skip_frame, wider_tracing
from fxpar._torch.dynamo import change_tracing, layers_traced_once
from fxpar._torch.dynamo.replaced_functions import trace_in_place_of
from fxpar.errors import FxparError, NotCompiledError
from fxpar.ir.capture import Capture, read_capture
from fxpar.ir.ctc_loss import ctc_loss
from fxpar.ir.flex_attention import flex_attention_in_one_graph
from fxpar.ir.inner_gradients import gradients_in_one_graph
from fxpar.progress.phases import as_phase

TRACES_KEPT = 64
"""For how many traces a model keeps steps: some batch sizes times some lengths, for training and evaluation."""

Step: TypeAlias = Callable[..., Any]
"""What runs instead of a captured graph, on the same arguments."""

BuildStep: TypeAlias = Callable[[Capture, Mapping[str, Any]], Step]
"""Makes the step of a capture, for the options that the user gave to `torch.compile`; called in the mode of the user.

The step may be called in either grad mode.
"""


class TraceApartError(Exception):
    """A forward cannot run without grad by the trace of the same forward with grad."""


class ForwardTracer:
    """Traces the marked forward of one model, and runs what is built from its traces.

    Dynamo guards each trace, and looks it up by the object that asked for it. For a distributed model that is always
    this one: what `distribute` captured serves every `torch.compile`, whatever its options, while the guards hold.
    It serves training and evaluation: Dynamo traces as in training, unless the forward depends on the grad mode.
    """

    def __init__(self, model: nn.Module) -> None:
        change_tracing()
        trace_in_place_of(functional.ctc_loss, ctc_loss)
        trace_in_place_of(functional.gaussian_nll_loss, functional.gaussian_nll_loss)  # itself: it checks variances
        self._model = model
        self._layers_traced_once = layers_traced_once(model)
        self._backend: Callable[..., Any] | None = None
        self._build: BuildStep | None = None
        self._options: Mapping[str, Any] | None = None
        self._arguments: Any = None  # of the call under way
        self._evaluates_in: bool | None = None  # while `evaluate` is under way, whether inference mode is on outside
        self._has_begun = False
        self._used: OrderedDict[_Steps, None] = OrderedDict()  # the latest last

    def serve(self, backend: Callable[..., Any], build: BuildStep) -> None:
        """Take the place of `backend`, which users name to `torch.compile`: `build` makes the steps."""
        self._backend, self._build = backend, build

    def of_copy(self, model: nn.Module) -> ForwardTracer:
        """One for the forward of `model`, an equal one, that serves the same backend."""
        found = ForwardTracer(model)
        found._backend, found._build = self._backend, self._build
        return found

    @cached_property
    def _traced(self) -> Callable[..., Any]:
        # By keyword: Lightning replaces `torch.compile` by one that copies the options of a positional module, deeply.
        traced: Callable[..., Any] = torch.compile(model=self._model, backend=self._trace, dynamic=False)
        return traced

    @property
    def requested(self) -> Mapping[str, Any] | None:
        """The options of the `torch.compile` with this tracer's backend that Python runs under; None without it."""
        return None if self._backend is None else compile_options(self._backend)

    @property
    def is_called(self) -> bool:
        """Whether `run` is under way: a forward that then runs as plain Python was given up by Dynamo."""
        return self._options is not None

    @as_phase
    def capture(self, device_type: str, example_inputs: Sequence[Any] | Mapping[str, Any]) -> Capture:
        """The forward for these arguments, which does not run; meta tensors are replaced by empty ones.

        Raises: as `read_capture`.
        """
        args, kwargs = ((), example_inputs) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.zeros_like(t, device=device_type) if t.is_meta else t, (args, dict(kwargs))
        )
        self._arguments = args, kwargs
        try:
            with torch.enable_grad(), bare_traces(), self._tracing():
                self._traced(*args, **kwargs)
        except _Captured as captured:
            return captured.capture
        finally:
            self._arguments = None
        raise AssertionError("the forward ran without being compiled")

    @never_compiled  # it is called under the user's `torch.compile`, and begins its own
    def run(self, options: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the forward as a step, which is built for each trace and each set of options.

        Raises: as `read_capture`, and what the building and the step raise.
        """
        self._options, self._arguments = options, (args, kwargs)
        try:
            with self._tracing():
                return self._traced(*args, **kwargs)
        finally:
            self._options = self._arguments = None

    @skip_frame
    def evaluate(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the traced `forward` with the guards of training; the step itself runs in the grad mode of the caller.

        Raises:
            TraceApartError: the forward depends on the grad mode, or could not be traced.
            and what the building and the step raise.
        """
        self._evaluates_in, self._has_begun = torch.is_inference_mode_enabled(), False
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return forward(*args, **kwargs)
        except Exception as error:
            if self._has_begun:
                raise
            raise TraceApartError from error
        finally:
            self._evaluates_in = None

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Within, Dynamo traces more, and faster, than it does by itself. Every step enters it: it has to be cheap."""
        with (
            self._layers_traced_once(),
            flex_attention_in_one_graph(),
            gradients_in_one_graph(),
            wider_tracing(),
            _layers_op_by_op(),
        ):
            yield

    def _trace(self, module: fx.GraphModule, example_inputs: Sequence[Tensor]) -> Step:
        """The backend: what it returns is called in place of the graph, now and whenever the guards hold."""
        try:
            capture = replace(read_capture(module), numbers=_numbers_in(self._arguments))
        except FxparError as error:
            return raising(error)
        steps = _Steps(capture)

        def run(*given: Any) -> Any:
            if self._arguments is None:
                raise NotCompiledError
            if self._build is None or self._options is None:
                raise _Captured(capture)
            if self._evaluates_in is None:
                return self._step(steps, self._options, self._build)(*given)
            if capture.reads_grad_mode:
                raise TraceApartError
            self._has_begun = True
            with torch.inference_mode(self._evaluates_in), torch.no_grad():
                return self._step(steps, self._options, self._build)(*given)

        return run

    def _step(self, steps: _Steps, options: Mapping[str, Any], build: BuildStep) -> Step:
        self._note_use(steps)
        return steps.of(options, build)

    def _note_use(self, steps: _Steps) -> None:
        """Drop the steps of the trace that was not used for longest, if there are more than are kept."""
        self._used[steps] = None
        self._used.move_to_end(steps)
        if len(self._used) > TRACES_KEPT:
            oldest, _ = self._used.popitem(last=False)
            oldest.drop()


class _Steps:
    """The steps that were built from one trace, one for each set of options."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._built: list[tuple[Mapping[str, Any], Step]] = []

    def of(self, options: Mapping[str, Any], build: BuildStep) -> Step:
        for known, step in self._built:
            if known == options:
                return step
        step = build(self._capture, options)
        self._built.append((options, step))
        return step

    def drop(self) -> None:
        """Free what was built; the next call builds it anew."""
        self._built.clear()


def _numbers_in(arguments: Any) -> frozenset[float]:
    leaves = pytree.tree_leaves(arguments)
    return frozenset(leaf for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool))


@contextmanager
def _layers_op_by_op() -> Iterator[None]:
    """Within, encoder layers and attention of PyTorch compute the same ops in evaluation as in training.

    Without gradients they would be one op each, of which no rule could say how it shards.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def capture_forward(model: nn.Module, device_type: str, example_inputs: Sequence[Any] | Mapping[str, Any]) -> Capture:
    """The forward of `model`; see `ForwardTracer.capture`."""
    return ForwardTracer(model).capture(device_type, example_inputs)


class _Captured(Exception):
    """Carries a capture past the code that Dynamo generated, so that nothing runs."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture


def raising(error: FxparError) -> Step:
    """A callable that raises `error`: if a backend itself raised it, Dynamo would wrap it in its own error class."""

    def fail(*args: Any) -> Any:
        raise error

    return fail
