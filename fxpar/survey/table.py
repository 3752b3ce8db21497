"""What a survey found, as a page in Markdown: a row for each family, a column for each mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fxpar.survey.compare import MICROBATCHES
from fxpar.survey.run import GRADIENT_BAR, LOSS_BAR, MESHES, PRECISE_BAR, Finding

_INTRODUCTION = f"""\
# Families of models, and whether they train

Tiny random models of all families of transformers, of the models of diffusers, and of some of timm, their sizes shrunk
by the names of their settings, are trained for one step of {MICROBATCHES} microbatches on a mesh, by the plan that
their authors ship, where they ship one. The loss and all gradients are compared with the same step of the model on one
process; a model that draws random numbers in training is compared in evaluation mode. Right means a loss within
{LOSS_BAR:.0e} and gradients within {GRADIENT_BAR:.0e}. What is not right is compared once more in float64, and is right
if it is so within {PRECISE_BAR:.0e} there, where some models compute their softmax in float32 all the same: the rest
was rounding. A cell has the worst error of a gradient, relative to its largest element, and the largest part of the
parameters that a rank holds: parity of replicated weights would prove little. Where the authors ship a plan, columns
named "search" have what comes out without it. Ops without a sharding rule are computed whole by all ranks along x.

`fxpar survey --markdown FILE` makes this page; it goes on where an earlier run stopped.
"""


def to_markdown(findings: Sequence[Finding]) -> str:
    """The page: an introduction, the numbers of verdicts, the table, and what went wrong, in a list."""
    order = list(MESHES)
    by_mesh = sorted(findings, key=lambda finding: (order.index(finding.mesh), finding.layouts))
    columns = list(dict.fromkeys(map(_column, by_mesh)))
    rows: dict[tuple[str, str], dict[str, Finding]] = {}
    for finding in findings:
        rows.setdefault((finding.family, finding.head), {})[_column(finding)] = finding
    lines = [
        _INTRODUCTION,
        _summary(findings),
        "",
        f"| family | head | {' | '.join(columns)} | ops without a rule | seconds |",
        f"|---|---|{'---|' * (len(columns) + 2)}",
        *(_row(family, head, found, columns) for (family, head), found in rows.items()),
        "",
        *_reasons(findings),
    ]
    return "\n".join(lines) + "\n"


def _column(finding: Finding) -> str:
    return finding.mesh if finding.layouts == "default" else f"{finding.mesh}, {finding.layouts}"


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    families = len({(finding.family, finding.head) for finding in findings})
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{families} families, {len(findings)} runs: {found}."


def _row(family: str, head: str, found: Mapping[str, Finding], columns: Iterable[str]) -> str:
    cells = [_cell(found[column]) if column in found else "" for column in columns]
    ops = ", ".join(sorted({op for finding in found.values() for op in finding.without_rule}))
    seconds = sum(finding.seconds for finding in found.values())
    return f"| {family} | {head} | {' | '.join(cells)} | {ops} | {seconds:.0f} |"


def _cell(finding: Finding) -> str:
    match finding.verdict:
        case "right" if finding.gradient_error > GRADIENT_BAR:
            return f"{finding.gradient_error_in_float64:.0e} in float64, {finding.share:.2f}"
        case "right":
            return f"{finding.gradient_error:.0e}, {finding.share:.2f}"
        case "wrong":
            return f"**{finding.gradient_error:.0e}**, {finding.share:.2f}"
        case _:
            return finding.verdict


def _reasons(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each reason, with the families and columns that it holds for."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for finding in findings:
        if finding.reason:
            by_reason.setdefault(finding.reason, {}).setdefault(finding.family, []).append(_column(finding))
    for reason, families in by_reason.items():
        names = "; ".join(f"{family} on {', '.join(columns)}" for family, columns in families.items())
        yield f"- {names}: {reason}"
