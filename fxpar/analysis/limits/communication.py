"""Exposed communication: ranks wait for collectives over an axis, or for values of other stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.limits.limit import Limit
from fxpar.analysis.limits.words import bytes_text, counted, percent, rate_text, time_text
from fxpar.analysis.predicted_parts import runs_of
from fxpar.report.facts import AxisFacts, add_up
from fxpar.report.step_parts import PIPE, StepParts


def communication(step: DumpedStep, parts: StepParts) -> Iterator[Limit]:
    """The exposed communication over each axis, and over which link."""
    for axis in step.facts.axes:
        if not (waited_us := parts.exposed_us.get(axis.axis, 0.0)):
            continue
        share = parts.share(waited_us)
        what = _transfers(step) if axis.axis == PIPE else _collectives(step, axis.axis)
        finding = (
            f"Ranks wait {percent(share)} of the step, {time_text(waited_us)}, for {what} over {axis.axis} "
            f"({axis.size} ranks), {_link(step, axis)}."
        )
        yield Limit("communication", f"Exposed communication over {axis.axis}", share, finding, _advice(step, axis))


def _collectives(step: DumpedStep, axis: str) -> str:
    """The kind of collective over an axis that some stage waits longest for."""
    traffic = [each for stage, facts in step.stages.items() for each in add_up(facts.collectives, runs_of(step, stage))]
    worst = max((each for each in traffic if each.axis == axis), key=lambda each: each.exposed_us)
    return f"{worst.kind} ({round(worst.count)} per step and rank, {bytes_text(worst.sent_bytes)} sent)"


def _transfers(step: DumpedStep) -> str:
    sent = [each.num_bytes for each in step.facts.transfers if not each.once_per_step]
    between = bytes_text(step.facts.microbatches * sum(sent))
    return f"{counted(len(sent), 'transfer')} between stages per microbatch ({between} per step between hosts)"


def _link(step: DumpedStep, axis: AxisFacts) -> str:
    own = rate_text(axis.bytes_per_us)
    if not axis.crosses_hosts:
        return f"inside hosts at {own} per rank"
    inside = rate_text(step.facts.cluster.inside_bytes_per_us)
    hosts = f"whose groups span {axis.num_hosts} hosts"
    return f"{hosts}: the network between hosts has {own} per rank, inside it is {inside}"


def _advice(step: DumpedStep, axis: AxisFacts) -> str:
    match axis.axis:
        case "x" | "y":
            return _less_tensor_parallelism(step, axis)
        case "z":
            return 'Use a smaller z with more data, or the option `gather_weights="step"` if memory allows.'
        case "data":
            return "Use more microbatches per step, so that gradients are summed less often."
    hiding = "" if step.facts.schedule_name.startswith("eager") else "a schedule that hides transfers (eager-1f1b), "
    return f"Use {hiding}fewer pipe ranks, or boundaries of stages that fewer bytes cross."


def _less_tensor_parallelism(step: DumpedStep, axis: AxisFacts) -> str:
    per_host = max(Counter(step.facts.hosts).values())
    if not axis.crosses_hosts:
        return f"Use a smaller {axis.axis}, with more data or pipe in its place, or larger microbatches."
    if per_host == 1:
        return "Each host has one rank: split the model by pipe, or the batch by data, in place of matrices."
    return (
        f"Keep tensor parallelism inside hosts, which have {per_host} ranks: make x times y a divisor of {per_host}, "
        "and use pipe or data between hosts."
    )
