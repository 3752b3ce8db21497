"""Build the callables that the backend returns: also for forwards of whose results a script computes its loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fxpar.build_step import build_step
from fxpar.config import OWN_SAMPLES, Options
from fxpar.environment import is_first_rank
from fxpar.errors import InvalidOptionError, NoLossError, OutsideLossWarning
from fxpar.ir.capture import Capture
from fxpar.model.distribution import distribution_of
from fxpar.passes.settle_capture import settle_capture, settle_with_result_gradients
from fxpar.runtime.differentiable_step import DifferentiableStep, StepOfResults
from fxpar.runtime.step import Step


def build_training(capture: Capture, options: Options) -> Callable[..., tuple[Any, ...]]:
    """The callable that runs a step with its backward; a collective of all ranks.

    A script may compute losses of results that are plain tensors, whether or not the forward returns one, too. Where no
    result requires grad, as those of a frozen teacher, there is no backward.

    Raises:
        NoLossError: there is no loss, and no result that can be differentiated, although some require grad.
        InvalidOptionError: there is no loss, and results are not to be plain tensors.
        and as `build_step`.
    """
    if not capture.differentiable:
        return build_evaluation(capture, options)
    if capture.loss is None:
        return _without_loss(capture, options)
    step = build_step(capture, options, with_backward=True)
    return _beside_loss(capture, options, step) if options.results == OWN_SAMPLES else step


def build_evaluation(capture: Capture, options: Options) -> Callable[..., tuple[Any, ...]]:
    """The callable that runs the forwards: of the training step, where a script computes losses of the same results.

    Raises: as `build_step`.
    """
    distribution = distribution_of(capture.model)
    if distribution.losses_are_outside and capture.reported is None and options.results in (None, OWN_SAMPLES):
        differentiated = settle_with_result_gradients(capture, distribution)
        if differentiated.result_gradients:
            return _step_of_results(differentiated, options, with_backward=False)
    return build_step(capture, options, with_backward=False)


def _without_loss(capture: Capture, options: Options) -> DifferentiableStep:
    """The callable for a forward that returns no loss."""
    distribution = distribution_of(capture.model)
    differentiated = settle_with_result_gradients(capture, distribution)
    if not differentiated.result_gradients:
        raise NoLossError(capture.describe_results())
    if options.results not in (None, OWN_SAMPLES):
        raise InvalidOptionError("results", options.results, f"{OWN_SAMPLES!r}, since the forward returns no loss")
    _warn()
    training = _step_of_results(differentiated, options, with_backward=True)
    forward = _step_of_results(differentiated, options, with_backward=False)
    distribution.losses_are_outside = True
    return DifferentiableStep(settle_capture(capture, distribution), distribution, forward, lambda: training)


def _beside_loss(capture: Capture, options: Options, step: Step) -> Callable[..., tuple[Any, ...]]:
    """The callable for a forward with a loss and other results; the first backward from one of these builds a step."""
    distribution = distribution_of(capture.model)
    settled = settle_capture(capture, distribution)
    if settled.differentiable == [settled.loss]:
        return step

    @cache
    def training() -> StepOfResults:
        _warn()
        with torch.enable_grad():  # which it is not in a backward
            differentiated = settle_with_result_gradients(capture, distribution)
            return _step_of_results(differentiated, replace(options, dump=None), with_backward=True)

    return DifferentiableStep(settled, distribution, step, training)


def _step_of_results(differentiated: Capture, options: Options, *, with_backward: bool) -> StepOfResults:
    step = build_step(differentiated, replace(options, results=OWN_SAMPLES), with_backward=with_backward)
    return StepOfResults(differentiated, distribution_of(differentiated.model), step)


def _warn() -> None:
    if is_first_rank():
        warnings.warn(OutsideLossWarning(), stacklevel=2)
