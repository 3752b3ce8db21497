"""Find ops that mix the samples of a batch, so that their results depend on how the batch is divided."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fxpar.environment import is_first_rank
from fxpar.errors import BatchMixingWarning, ChangingBufferWarning, SumLossWarning
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import where
from fxpar.ir.samples import Reduced
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.decompose.changing_buffers import changing_buffer
from fxpar.passes.decompose.follow_samples import follow_capture
from fxpar.world.mesh import num_batch_shards


def warn_of_batch_mixing(stages: Sequence[JointGraph], capture: Capture, distribution: Distribution) -> None:
    """Warn once, if the batch is divided, of an op that makes the loss depend on how it is, or of a loss that is a sum.

    Examples are a matrix product of samples with each other, a softmax over the batch, and the statistics of a norm
    over the batch; likewise a buffer that the batch changes and the loss reads. A loss may be the mean over samples, or
    a linear function of means, and may be divided by a value that depends on no parameter: `total_over_batch` makes it
    that of the whole batch. Where single samples are computed, no op is found.
    """
    microbatches, num_shards = distribution.microbatches_of(capture), num_batch_shards(distribution.mesh)
    num_samples, is_whole = capture.microbatch_size, distribution.num_parts(capture) == 1
    if distribution.has_warned_of_mixing or is_whole or num_samples is None or not is_first_rank():
        return
    results = range(len(capture.results)) if capture.loss is None else [capture.loss]
    wanted = [Port(PortKind.RESULT, str(position)) for position in results]
    found = follow_capture(stages, capture, wanted, means_are_whole=microbatches == 1)
    warning: Warning | None = None
    if found.mixing is not None and num_samples > 1:
        op, line = found.mixing.target, where(found.mixing)
        warning = BatchMixingWarning(op, line, num_samples, microbatches, num_shards)
    elif (change := changing_buffer(stages, wanted)) is not None:
        warning = ChangingBufferWarning(where(change), microbatches, num_shards)
    elif _is_users(capture.loss, capture) and found.outputs.get(wanted[0]) in (Reduced.SUM, Reduced.LINEAR):
        warning = SumLossWarning(microbatches, num_shards)
    if warning is not None:
        distribution.has_warned_of_mixing = True
        warnings.warn(warning, stacklevel=2)


def _is_users(loss: int | None, capture: Capture) -> bool:
    """Whether the forward returns this loss, rather than results that a script computes one of."""
    return loss is not None and not capture.result_gradients
