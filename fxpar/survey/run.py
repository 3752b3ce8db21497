"""Try families on meshes, one after another, and keep what is found in a file that a later run goes on with."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from fxpar.survey.compare import Comparison, compare_step, compiles_alone
from fxpar.survey.families import Family
from fxpar.world.launch import RankFailedError, run_ranks

LOSS_BAR, GRADIENT_BAR = 1e-5, 1e-4

PRECISE_BAR = 1e-6
"""In float64. What is wrong is as wrong there as in float32; some models compute their softmax in float32 anyway."""

MESHES: Mapping[str, Mapping[str, int]] = {
    "pipe=2": {"pipe": 2},
    "z=2": {"z": 2},
    "x=2": {"x": 2},
    "pipe=2 x x=2": {"pipe": 2, "x": 2},
}

TIMEOUT_S = 240.0
"""A tiny model takes ten seconds; one with hundreds of ops per token a few minutes."""

Verdict = Literal["right", "wrong", "fails", "torch.compile fails", "does not train alone"]
"""The last two: also on one process, `torch.compile` does not capture it as one graph, or it has no step at all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a family on a mesh.

    share: the largest part of the parameters that a rank holds.
    without_rule: the ops that have no sharding rule, which ranks along an axis therefore all compute whole.
    by_plan: whether hints came from the authors' plan.
    gradient_error_in_float64: of a family that is compared once more since it is not right in float32: then it is right
        if it is so here within PRECISE_BAR, so that all that was wrong is rounding.
    """

    family: str
    head: str
    mesh: str
    layouts: str
    verdict: Verdict
    loss_error: float
    gradient_error: float
    share: float
    reason: str
    seconds: float
    without_rule: Sequence[str] = ()
    by_plan: bool = False
    gradient_error_in_float64: float | None = None


def survey(
    families: Sequence[Family], meshes: Sequence[str], layouts: Sequence[str], file: Path, lowering: str = "aten"
) -> Iterator[Finding]:
    """All findings, in order: those that `file` has already, and new ones, which are appended to it as JSON lines.

    The layouts "search" are tried where the default ones come from the authors' plan, and so are others.
    """
    known = {_key(each): each for each in read_findings(file)}
    for family in families:
        for mesh in meshes:
            for layout in layouts if "x" in MESHES[mesh] else layouts[:1]:
                default = known.get((family.name, family.head, mesh, "default"))
                if layout == "search" and default is not None and not default.by_plan:
                    continue
                key = family.name, family.head, mesh, layout
                if key not in known:
                    known[key] = _try(family, mesh, layout, lowering)
                    with file.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(asdict(known[key])) + "\n")
                yield known[key]


def read_findings(file: Path) -> list[Finding]:
    """The findings in a file; none if there is no file."""
    if not file.exists():
        return []
    return [Finding(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _key(finding: Finding) -> tuple[str, str, str, str]:
    return finding.family, finding.head, finding.mesh, finding.layouts


def _try(family: Family, mesh: str, layouts: str, lowering: str) -> Finding:
    start = time.monotonic()
    key = family.name, family.head, mesh, layouts
    try:
        ranks = _compare(family, mesh, layouts, lowering)
        precise = ranks if _is_right(ranks) else _compare(family, mesh, layouts, lowering, torch.float64)
    except RankFailedError as error:
        kind, reason = _reason(str(error))
        verdict: Verdict = "does not train alone" if kind == "NotTrainableError" else _why_it_fails(family)
        return Finding(*key, verdict, math.nan, math.nan, math.nan, reason, time.monotonic() - start)
    is_right = _is_right(ranks) or _is_right(precise, PRECISE_BAR, PRECISE_BAR)
    gradient, worst = max((rank.gradient_error, rank.worst) for rank in ranks)
    return Finding(
        *key,
        "right" if is_right else "wrong",
        max(rank.loss_error for rank in ranks),
        gradient,
        max(rank.share for rank in ranks),
        "" if is_right else f"gradient of {worst}",
        time.monotonic() - start,
        sorted({op for rank in ranks for op in rank.without_rule}),
        any(rank.by_plan for rank in ranks),
        None if precise is ranks else max(rank.gradient_error for rank in precise),
    )


def _compare(
    family: Family, mesh: str, layouts: str, lowering: str, dtype: torch.dtype = torch.float32
) -> list[Comparison]:
    return run_ranks(
        math.prod(MESHES[mesh].values()),
        compare_step,
        family,
        MESHES[mesh],
        None if layouts == "default" else layouts,
        lowering,
        dtype,
        environment={"FXPAR_CACHE_DIR": ""},
        timeout_s=TIMEOUT_S,
    )


def _is_right(ranks: Sequence[Comparison], loss: float = LOSS_BAR, gradient: float = GRADIENT_BAR) -> bool:
    return all(rank.loss_error <= loss and rank.gradient_error <= gradient for rank in ranks)


def _why_it_fails(family: Family) -> Verdict:
    try:
        (compiles,) = run_ranks(1, compiles_alone, family, timeout_s=TIMEOUT_S)
    except RankFailedError:
        compiles = False
    return "fails" if compiles else "torch.compile fails"


def _reason(text: str) -> tuple[str, str]:
    """The kind of the error that a traceback ends with, and its message in one line."""
    raised = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Unsupported|Exit)): ?(.*)$", text, re.MULTILINE)
    if not raised:
        return "", text.strip().splitlines()[-1]
    kind, message = raised[-1]
    message = re.sub(r'File "[^"]*/site-packages/', 'File "', message)  # the same on every machine
    return kind, message if kind == "NotTrainableError" else f"{kind}: {message}"
