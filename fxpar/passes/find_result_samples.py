"""Find how the results of the parts of a batch make up those of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, fx

from fxpar.graph.extract import returned
from fxpar.graph.min_cut import closure, operands
from fxpar.ir.capture import Capture, example
from fxpar.ir.layout import Shard
from fxpar.ir.node_meta import tensor
from fxpar.ir.samples import Reduced, Samples
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.decompose.follow_samples import follow_capture
from fxpar.progress.phases import as_phase


@as_phase
def find_result_samples(
    stages: Sequence[JointGraph], capture: Capture, distribution: Distribution
) -> dict[Port, Samples]:
    """Where samples are in the results of the forward other than its loss, which is a mean; by the rules of all ops.

    None if the batch comes in one part. Where the rules do not tell, and for what is computed from sizes alone, a first
    dim as long as a microbatch is taken for that of the samples; it surely is if the next one is as long as an input's,
    as in the logits of tokens.

    Args:
        stages: the joint graphs of all stages, in order, as decomposed for sharding.
    """
    num_samples = capture.microbatch_size
    wanted = [Port(PortKind.RESULT, str(i)) for i in range(len(capture.results)) if i != capture.loss]
    if distribution.num_parts(capture) == 1 or num_samples is None or not wanted:
        return {}
    followed = follow_capture(stages, capture, wanted).outputs
    leading = _leading_sizes(capture)
    found: dict[Port, Samples] = {}
    for port, node in zip(stages[-1].outputs, returned(stages[-1].module), strict=False):
        if port not in wanted:
            continue
        known = samples = followed.get(port)
        if known is Reduced.UNKNOWN or (known is None and not _depends_on_values(node)):
            samples = Shard(0, num_samples) if tensor(node).shape[:1] == (num_samples,) else known
        if samples is not None:
            found[port] = samples
        is_clear = isinstance(samples, Shard) and tuple(tensor(node).shape[:2]) in leading
        if known in (Reduced.UNKNOWN, Reduced.LINEAR) and not is_clear:
            _warn(port, tensor(node), taken_for_samples=isinstance(samples, Shard))
    return found


def _leading_sizes(capture: Capture) -> set[tuple[int, ...]]:
    """The first two sizes of each input that has samples in its first dim."""
    ports = {port for port, dim in capture.batch_dims.items() if dim == 0}
    shapes = [example(node).shape for node, port in capture.sources.items() if port in ports]
    return {tuple(shape[:2]) for shape in shapes if len(shape) > 1}


def _depends_on_values(node: fx.Node) -> bool:
    return any(source.op == "placeholder" for source in closure([node], operands))


def _warn(port: Port, result: Tensor, *, taken_for_samples: bool) -> None:
    """Warn of a result that may not be that of the whole batch."""
    if taken_for_samples:
        becomes = "its first dim, which is as long as a microbatch, is taken for that of the samples"
    elif result.dim() == 0 and result.is_floating_point():
        becomes = "it is the mean over all microbatches"
    else:
        becomes = "it is that of the last microbatch"
    warnings.warn(
        f"result {port.name} of the forward ({result.dtype}, shape {tuple(result.shape)} for each microbatch) is "
        f"computed from samples in a way of which it is not known how parts of a batch make up the whole: {becomes}; "
        "if that is wrong, return what it is computed from, and compute it after the step",
        stacklevel=2,
    )
