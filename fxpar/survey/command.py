"""The command: try families, print what is found as it is found, and write the table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from fxpar.survey.families import HEADS, all_families
from fxpar.survey.run import MESHES, survey
from fxpar.survey.table import to_markdown


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="names as in `model_type` (default: all)")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS), help="default: all")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES), help="default: all")
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=("default", "search"),
        default=["default", "search"],
        help="with an x axis, by the authors' plan where there is one, and by the search alone (default: both)",
    )
    parser.add_argument("--lowering", choices=("aten", "inductor"), default="aten", help="default: aten")
    parser.add_argument(
        "--save",
        type=Path,
        default=Path("survey.jsonl"),
        metavar="FILE",
        help="where findings are kept, a line each; what is there already is not tried again (default: survey.jsonl)",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where to write the table (default: nowhere)")


def run(options: Namespace, console: Console) -> int:
    """Try all; returns the exit status, 1 if a run was wrong or failed."""
    chosen = list(all_families(options.heads))
    if options.families:
        chosen = [each for each in chosen if each.name in options.families]
    found = []
    for finding in survey(chosen, options.meshes, options.layouts, options.save, options.lowering):
        found.append(finding)
        error = f"{finding.gradient_error:.0e}" if finding.verdict in ("right", "wrong") else finding.reason
        console.out(
            f"{finding.family:24} {finding.head:10} {finding.mesh:13} {finding.layouts:8} {finding.verdict} {error}",
            highlight=False,
        )
    if options.markdown is not None:
        options.markdown.write_text(to_markdown(found), encoding="utf-8")
    return 1 if any(finding.verdict in ("wrong", "fails") for finding in found) else 0
