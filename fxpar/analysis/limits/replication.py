"""Replicated work: ranks that could share an op run all of it, each for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.limits.limit import Limit
from fxpar.analysis.limits.words import percent, time_text
from fxpar.report.facts import ReplicatedFacts
from fxpar.report.step_parts import StepParts


def replication(step: DumpedStep, parts: StepParts) -> Iterator[Limit]:
    """The work that ranks along y and x repeat, and the op that is most of it."""
    ops = [(each, stage) for stage, facts in step.stages.items() for each in facts.replicated]
    if not ops:
        return
    worst, stage = max(ops, key=lambda found: found[0].wasted_us)
    share = parts.share(parts.replicated_us)
    most = percent(worst.wasted_us / sum(op.wasted_us for op, _ in ops))
    num_ranks = math.prod(step.facts.sizes[axis] for axis in worst.axes)
    finding = (
        f"For {percent(share)} of the step, {time_text(parts.replicated_us)}, ranks repeat the work of one another. "
        f"Most of that, {most}, is `{worst.op}` in {_module(worst)} (stage {stage}), which all {num_ranks} ranks along "
        f"{' and '.join(worst.axes)} run as a whole: {time_text(worst.time_us)} per microbatch."
    )
    yield Limit("replication", "Replicated work", share, finding, _advice(worst))


def _module(op: ReplicatedFacts) -> str:
    return f"`{op.module}`" if op.module else "the root module"


def _advice(op: ReplicatedFacts) -> str:
    if not op.has_rule:
        return f"`{op.op}` has no sharding rule: give it one by `fxpar.register_rule`."
    axes = " and ".join(op.axes)
    return (
        f"Hint a layout for the weights or the result of {_module(op)} in `layouts`; or use a smaller {axes}, with "
        "more data or pipe in its place."
    )
