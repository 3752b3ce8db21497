"""Find ops that mix the samples of a batch, so that their results depend on how the batch is divided."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fxpar.environment import is_first_rank
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import where
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.decompose.follow_samples import follow_samples
from fxpar.world.mesh import num_batch_shards


def warn_of_batch_mixing(stages: Sequence[JointGraph], capture: Capture, distribution: Distribution) -> None:
    """Warn once, if the batch is divided, of an op that makes the loss depend on how it is.

    Examples are a matrix product of samples with each other, a softmax over the batch, and the statistics of a norm
    over the batch. A loss may be the sum or the mean over samples, or a linear function of these, and may be divided by
    a value that depends on no parameter: `total_over_batch` makes it that of the whole batch. Where single samples are
    computed, none is found.
    """
    microbatches, num_shards = distribution.microbatches_of(capture), num_batch_shards(distribution.mesh)
    num_samples = capture.microbatch_size
    if (
        distribution.has_warned_of_mixing
        or microbatches * num_shards == 1
        or num_samples in (None, 1)
        or not is_first_rank()
    ):
        return
    results = range(len(capture.results)) if capture.loss is None else [capture.loss]
    wanted = [Port(PortKind.RESULT, str(position)) for position in results]
    node = follow_samples(stages, capture.batch_dims, num_samples, wanted, means_are_whole=microbatches == 1).mixing
    if node is not None:
        distribution.has_warned_of_mixing = True
        warnings.warn(
            f"{node.target} in {where(node)} combines samples of the batch with each other, and sees {num_samples} "
            f"at a time: the batch comes in {microbatches} microbatches on {num_shards} shards, on whose numbers the "
            "loss and its gradients therefore depend. For those of the whole batch, use one microbatch and no axes "
            "data and z, or an operation that treats every sample by itself",
            stacklevel=2,
        )
