"""Find ops that mix the samples of a batch, so that their results depend on how the batch is divided."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fxpar.environment import is_first_rank
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import where
from fxpar.ir.samples import Reduced
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.decompose.follow_samples import follow_samples
from fxpar.world.mesh import num_batch_shards


def warn_of_batch_mixing(stages: Sequence[JointGraph], capture: Capture, distribution: Distribution) -> None:
    """Warn once, if the batch is divided, of an op that makes the loss depend on how it is, or of a loss that is a sum.

    Examples are a matrix product of samples with each other, a softmax over the batch, and the statistics of a norm
    over the batch. A loss may be the mean over samples, or a linear function of means, and may be divided by a value
    that depends on no parameter: `total_over_batch` makes it that of the whole batch. Where single samples are
    computed, no op is found.
    """
    microbatches, num_shards = distribution.microbatches_of(capture), num_batch_shards(distribution.mesh)
    num_samples, num_parts = capture.microbatch_size, distribution.num_parts(capture)
    if distribution.has_warned_of_mixing or num_parts == 1 or num_samples is None or not is_first_rank():
        return
    results = range(len(capture.results)) if capture.loss is None else [capture.loss]
    wanted = [Port(PortKind.RESULT, str(position)) for position in results]
    found = follow_samples(stages, capture.batch_dims, num_samples, wanted, means_are_whole=microbatches == 1)
    text = None
    if found.mixing is not None and num_samples > 1:
        text = _MIXES.format(found.mixing.target, where(found.mixing), num_samples, microbatches, num_shards)
    elif capture.loss is not None and found.outputs.get(wanted[0]) in (Reduced.SUM, Reduced.LINEAR):
        text = _IS_SUM.format(microbatches, num_shards, num_parts)
    if text is not None:
        distribution.has_warned_of_mixing = True
        warnings.warn(text, stacklevel=2)


_MIXES = (
    "{} in {} combines samples of the batch with each other, and sees {} at a time: the batch comes in {} microbatches "
    "on {} shards, on whose numbers the loss and its gradients therefore depend. For those of the whole batch, use one "
    "microbatch and no axes data and z, or an operation that treats every sample by itself"
)

_IS_SUM = (
    "the loss is a sum over samples, or has a term that is one. Of {} microbatches on {} batch shards the mean is "
    "taken, as of any loss: such a sum, and its gradients, are 1/{} of those of the whole batch. Divide the sum in the "
    "forward, by the number of samples for instance, or multiply it by the number of microbatches and shards"
)
