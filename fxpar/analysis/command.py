"""The command `fxpar report`: read a dump, and write its page."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from fxpar.analysis.write_report import REPORT, write_report


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", type=Path, help='what a compile with options={"dump": FOLDER} has written')
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"default: {REPORT} in that folder")
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="traces of a recorded step, or the folder of them (default: those of the option `timeline`)",
    )


def run(options: Namespace, console: Console) -> int:
    """Write the page, and print where it is; returns the exit status.

    Raises NoFactsError, InvalidCostsError, InvalidTimelineError.
    """
    console.print(str(write_report(options.folder, options.output, options.measured)), highlight=False, soft_wrap=True)
    return 0
