"""Let results of a forward other than its loss be differentiated: their gradients become inputs of the step."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import fx

from fxpar.ir.capture import Capture, example
from fxpar.ir.example_values import add_call, value_of_call
from fxpar.ir.layout import Shard
from fxpar.ir.markers import is_marker
from fxpar.ir.result_gradients import ResultGradient, gradient_name
from fxpar.ir.samples import Reduced, Samples
from fxpar.ir.stage import Port, PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.find_result_samples import find_result_samples
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from fxpar.progress.phases import as_phase


@as_phase
def differentiate_results(capture: Capture, distribution: Distribution) -> Capture:
    """The capture with a loss whose gradients are those of its results, if they are given the gradients of these.

    A script that computes its loss of the results of a batch shard wants, as under DistributedDataParallel, the mean
    over batch shards of the gradients of these losses. That of a step is the mean over all parts of a batch, hence the
    factors: the number of microbatches for samples, the number of parts for sums, and 1 for means.

    Before: `return logits`
    After:  `return logits, (logits * logits_gradient).sum() * microbatches`

    Results of which it is not known how those of parts make up the whole are not differentiated; if there are no
    others, or none that require grad, the capture is returned.

    Args:
        capture: settled; of a loss that it has, nothing is wanted.
    """
    wanted = [i for i in capture.differentiable if i != capture.loss]
    samples = _samples(capture, distribution) if wanted else {}
    known = {i: samples.get(Port(PortKind.RESULT, str(i))) for i in wanted}
    factors = {i: factor for i, found in known.items() if (factor := _factor(found, capture, distribution)) is not None}
    if not factors:
        return capture
    capture = capture.copied()
    return _Writer(capture).with_loss(known, factors)


def _samples(capture: Capture, distribution: Distribution) -> Mapping[Port, Samples]:
    """Where samples are in the results, which does not depend on how the forward is cut into stages and laid out."""
    (stage,) = split_stages(capture, ())
    joint = trace_joint(stage, with_backward=False)
    joint = replace(joint, module=decompose_for_sharding(joint.module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same are given when the step is planned
        return find_result_samples([joint], capture, distribution)


def _factor(samples: Samples | None, capture: Capture, distribution: Distribution) -> int | None:
    """By what to multiply the product of a result and its gradient; None if the result cannot be differentiated."""
    if isinstance(samples, Shard):
        return distribution.microbatches_of(capture) if samples.outer == 1 else None
    if samples is Reduced.SUM:
        return distribution.num_parts(capture)
    return 1 if samples in (None, Reduced.MEAN) else None


class _Writer:
    """Adds gradients and a loss to a capture, whose graph it changes."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._end = next(node for node in capture.module.graph.nodes if is_marker(node, "exit"))

    def with_loss(self, samples: Mapping[int, Samples | None], factors: Mapping[int, int]) -> Capture:
        capture = self._capture
        first = 1 + max(capture.arguments.values(), default=-1)
        nodes = {i: self._gradient(i) for i in factors}
        ports = {i: Port(PortKind.INPUT, gradient_name(i)) for i in factors}
        dims = {ports[i]: found.dim for i in factors if isinstance(found := samples[i], Shard)}
        products = [self._product(i, nodes[i], factor) for i, factor in factors.items()]
        loss = reduce(partial(add_call, self._end, operator.add), products)
        return replace(
            capture,
            sources={**capture.sources, **{nodes[i]: port for i, port in ports.items()}},
            results=[*capture.results, loss],
            named_loss=len(capture.results),
            arguments={**capture.arguments, **{port: first + n for n, port in enumerate(ports.values())}},
            batch_dims={**capture.batch_dims, **dims},
            result_gradients=tuple(
                ResultGradient(i, first + n, dims.get(port)) for n, (i, port) in enumerate(ports.items())
            ),
        )

    def _gradient(self, position: int) -> fx.Node:
        result, graph = self._capture.results[position], self._capture.module.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(gradient_name(position))
        node.meta["example_value"] = value_of_call(torch.empty_like, (result,)).detach()
        return node

    def _product(self, position: int, gradient: fx.Node, factor: int) -> fx.Node:
        result = self._capture.results[position]
        # In 16 bits, a factor on the loss might be infinite before it meets the gradient.
        dtype = torch.promote_types(example(result).dtype, torch.float32)
        operands = [add_call(self._end, "to", each, dtype) for each in (result, gradient)]
        total = add_call(self._end, "sum", add_call(self._end, operator.mul, *operands))
        return add_call(self._end, operator.mul, total, float(factor))
