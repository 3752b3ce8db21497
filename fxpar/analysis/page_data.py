"""All that the page of a report shows, as data that JSON can have; the scripts in fxpar/report/page read it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple
from typing import Any

from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.limits.find_limits import find_limits
from fxpar.analysis.predicted_parts import predicted_parts, runs_of
from fxpar.analysis.timeline_data import timelines, waits
from fxpar.analysis.transfer_data import transfers
from fxpar.report.facts import Traffic, add_up, module_pattern
from fxpar.report.step_parts import PIPE
from fxpar.schedule.memory import Part
from fxpar.schedule.timeline import COMPUTE

_SENT = {False: "value", True: "gradient"}

_MEMORY_KINDS: Mapping[str, tuple[Part, ...]] = {
    "weights": ("parameters",),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "activations": ("saved",),
    "buffers": ("received", "made"),
    "results": ("results",),
    "temporaries": ("working",),
}
"""What memory is used for, in the words of the page, from what stays to what goes."""


def page_data(step: DumpedStep) -> dict[str, Any]:
    """The data of the page, but for the graphs."""
    facts = step.facts
    return {
        "axes": [asdict(axis) for axis in facts.axes],
        "hosts": facts.hosts,
        "cluster": asdict(facts.cluster),
        "schedule": facts.schedule_name,
        "microbatches": facts.microbatches,
        "profiled": facts.profiled,
        "step_us": step.step_us,
        "measured_us": None if step.measured is None else step.measured.makespan_us,
        "parts": [asdict(part) for part in predicted_parts(step).parts],
        "limits": [asdict(limit) for limit in find_limits(step)],
        "stages": list(_stages(step)),
        "timelines": list(timelines(step)),
        "waits": waits(step),
        "traffic": [asdict(each) for each in _traffic(step)],
        "memory": list(_memory(step)),
        "layouts": [astuple(each) for each in facts.layouts],
        "collectives": list(_collectives(step)),
        "replicated": list(_replicated(step)),
        "transfers": list(transfers(step.facts)),
    }


def _stages(step: DumpedStep) -> Iterator[dict[str, Any]]:
    opens = ("", *step.facts.boundaries)
    for stage, rank in enumerate(step.schedule.placement):
        parameters = [each for each in step.facts.layouts if each.kind == "parameter" and each.stage == stage]
        yield {
            "stage": stage,
            "pipe": rank,
            "opens": opens[stage],
            "parameters": len(parameters),
            "num_bytes": sum(each.num_bytes for each in parameters),
            "rank_bytes": sum(each.rank_bytes for each in parameters),
            "actions": {
                kind: step.costs.action_us(stage, kind) for kind in ("F", "B") if step.costs.knows(stage, kind)
            },
            "edges": sorted({target for edge in step.costs.edges if edge.source == stage for target in edge.targets}),
        }


def _traffic(step: DumpedStep) -> Iterator[Traffic]:
    """By axis and kind, on the pipe rank that communicates longest."""
    worst: dict[tuple[str, str], Traffic] = {}
    for stages in (step.schedule.stages_of(rank) for rank in range(len(step.schedule.ranks))):
        of_rank: dict[tuple[str, str], Traffic] = {}
        for stage in stages:
            for each in add_up(step.stages[stage].collectives, runs_of(step, stage)) if stage in step.stages else ():
                key = each.axis, each.kind
                of_rank[key] = of_rank[key].plus(each) if key in of_rank else each
        for key, found in of_rank.items():
            worst[key] = max(found, worst.get(key, found), key=lambda each: each.time_us)
    yield from sorted(worst.values(), key=lambda each: -each.time_us)
    yield from _between_stages(step)


def _between_stages(step: DumpedStep) -> Iterator[Traffic]:
    """Values and gradients that all stages send, with the waits for them of all ranks."""
    exposed = list(step.dependencies.exposed())
    for is_gradient in (False, True):
        sent = [each for each in step.facts.transfers if each.is_gradient == is_gradient and not each.once_per_step]
        if sent:
            runs = step.facts.microbatches
            waited_us = sum(each.time_us for each in exposed if each.wait.kind == _SENT[is_gradient])
            num_bytes, time_us = sum(each.num_bytes for each in sent), sum(each.time_us for each in sent)
            kind = f"{_SENT[is_gradient]}s between stages"
            yield Traffic(PIPE, kind, runs * len(sent), runs * num_bytes, runs * time_us, waited_us)


def _memory(step: DumpedStep) -> Iterator[dict[str, Any]]:
    """By pipe rank, the bytes of each kind at the begin and at the end of each of its actions, in simulated time."""
    for rank, actions in enumerate(step.memory):
        spans = [span for span in step.simulated.spans if span.rank == rank and span.lane == COMPUTE]
        begins = sorted(spans, key=lambda span: span.begin_us)
        times, totals = [], []
        for span, memory in zip(begins, actions, strict=True):
            times += [round(span.begin_us, 2), round(span.end_us, 2)]
            totals += [memory.running, memory.after]
        yield {
            "rank": rank,
            "times": times,
            "actions": [str(memory.action) for memory in actions],
            "kinds": {
                name: [sum(each[part] for part in parts) for each in totals] for name, parts in _MEMORY_KINDS.items()
            },
        }


def _collectives(step: DumpedStep) -> Iterator[list[Any]]:
    """The collectives of every stage as rows; those of layers that are alike in all but their number are one row."""
    for stage, facts in step.stages.items():
        alike: Counter[tuple[Any, ...]] = Counter()
        for each in facts.collectives:
            row = (
                stage,
                each.graph,
                each.kind,
                each.axis,
                each.sent_bytes,
                round(each.time_us, 1),
                round(each.exposed_us, 1),
                module_pattern(each.module),
                re.sub(r"_\d+\b", "", each.verdict),  # those in names of nodes
            )
            alike[row] += each.count
        for row, count in alike.items():
            yield [*row, count]


def _replicated(step: DumpedStep) -> Iterator[list[Any]]:
    for stage, facts in step.stages.items():
        for each in facts.replicated:
            figures = round(each.time_us, 1), round(each.wasted_us, 1)
            if figures[-1]:
                yield [stage, each.op, each.module, each.count, " ".join(each.axes), each.has_rule, *figures]
