"""Memory: a rank that is nearly full leaves no room for more microbatches in flight, or larger ones."""

from __future__ import annotations

from collections.abc import Iterator

from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.limits.limit import Limit
from fxpar.analysis.limits.words import bytes_text

_NEARLY_FULL = 0.9


def memory(step: DumpedStep) -> Iterator[Limit]:
    """The pipe rank whose predicted peak is largest, if that is nearly all the memory that it has."""
    peaks = [max(sum(each.running.values()) for each in actions) for actions in step.memory]
    has = step.facts.memory_budget or step.facts.cluster.memory_bytes
    if peaks and max(peaks) >= _NEARLY_FULL * has:
        peak = max(peaks)
        finding = f"Ranks at {peaks.index(peak)} of pipe need {bytes_text(peak)} of {bytes_text(has)} at their peak."
        advice = 'Use the option `remat="min_cut"` or `"full"`, a larger z, or a schedule with less in flight (1f1b).'
        yield Limit("memory", "Memory", peak / has, finding, advice)
