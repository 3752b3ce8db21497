"""An explanation as JSON, with field names that stay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fxpar.explainer.explain import Explanation
from fxpar.explainer.proposals import Proposal, whole_parts
from fxpar.explainer.setup import Setup


def to_json(found: Explanation) -> dict[str, Any]:
    """Everything that is explained; times are in microseconds, sizes in bytes, gains are shares of the step."""
    return {
        "cluster": found.cluster.name,
        "setup": _setup(found.setup),
        "step_us": found.step_us,
        "parts_us": {part.name: part.time_us for part in whole_parts(found.estimate)},
        "bound_by": found.bound_by,
        "peak_bytes": found.estimate.peak_bytes,
        "memory_bytes": found.budget_bytes,
        "fits": found.fits,
        "memory_options": dict(found.estimate.options),
        "stages": [asdict(each) for each in found.stages],
        "ranks": [asdict(each) for each in found.ranks],
        "axes": [asdict(each) for each in found.axes],
        "collectives": [asdict(each) for each in found.collectives],
        "repeated_work": [asdict(each) for each in found.repeated],
        "shipped_plan": asdict(found.shipped_plan),
        "proposals": [_proposal(each) for each in found.proposals],
        "tried": [_proposal(each) for each in found.tried],
        "left_out": dict(found.left_out),
    }


def _setup(setup: Setup) -> dict[str, Any]:
    """As a user gives it."""
    return {"mesh": dict(setup.mesh), **setup.distribute_arguments, "options": setup.given_options}


def _proposal(each: Proposal) -> dict[str, Any]:
    return {
        "kind": each.change.kind,
        "change": each.change.text,
        "setup": _setup(each.change.setup),
        "step_us": each.step_us,
        "gain": each.gain,
        "reason": each.reason,
        "peak_bytes": each.estimate.peak_bytes,
    }
