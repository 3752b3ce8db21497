"""What is done to a captured forward before it is cut into stages."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from fxpar.errors import UnsupportedGraphError
from fxpar.ir.capture import Capture
from fxpar.ir.inner_gradients import gradients_of_means
from fxpar.ir.node_meta import where
from fxpar.model.distribution import Distribution
from fxpar.passes.copy_changed_arguments import copy_changed_arguments
from fxpar.passes.differentiate_results import differentiate_results
from fxpar.passes.keep_all_rows import keep_all_rows
from fxpar.passes.take_out_parameter_changes import take_out_parameter_changes
from fxpar.passes.total_over_batch import total_over_batch

_settled: WeakKeyDictionary[Capture, Capture | None] = WeakKeyDictionary()
_differentiated: WeakKeyDictionary[Capture, Capture | None] = WeakKeyDictionary()
"""What became of captures, None for those that stay as they are: a plan and several steps are made from each."""


def settle_capture(capture: Capture, distribution: Distribution) -> Capture:
    """The capture with known shapes, numbers of the whole batch as inputs, and no changes of parameters and arguments.

    Raises:
        UnsupportedGraphError: the forward takes the gradient of a mean over samples, of which there are several parts.
        and as `keep_all_rows`, `take_out_parameter_changes` and `copy_changed_arguments`.
    """
    if capture not in _settled:
        _check_gradients(capture, distribution)
        found = copy_changed_arguments(take_out_parameter_changes(keep_all_rows(capture)))
        found = total_over_batch(found, distribution)
        _settled[capture] = None if found is capture else found
        _settled[found] = None
    return _settled[capture] or capture


def settle_for_training(capture: Capture, distribution: Distribution) -> Capture:
    """The settled capture, with a loss of its results by `differentiate_results` if it has none.

    Raises: as `settle_capture`.
    """
    settled = settle_capture(capture, distribution)
    return settled if settled.loss is not None else settle_with_result_gradients(settled, distribution)


def settle_with_result_gradients(capture: Capture, distribution: Distribution) -> Capture:
    """The settled capture by `differentiate_results`, for all results but its loss.

    Raises: as `settle_capture`.
    """
    settled = settle_capture(capture, distribution)
    if settled not in _differentiated:
        found = differentiate_results(settled, distribution)
        _differentiated[settled] = None if found is settled else found
        _settled[found] = None
    return _differentiated[settled] or settled


def _check_gradients(capture: Capture, distribution: Distribution) -> None:
    of_means = gradients_of_means(capture.module)
    if of_means and (num_parts := distribution.num_parts(capture)) > 1:
        raise UnsupportedGraphError(
            f"{where(of_means[0])} takes the gradient of a number that is no sum, such as a mean over samples; that of "
            f"each of {num_parts} parts of the batch is not that of the whole batch. Expected the gradient of a sum, "
            "as by torch.autograd.grad(energies.sum(), positions), or one microbatch and no axes data and z"
        )
