"""The command: run examples/train_gpt.py on several processes, then say where its results are."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fxpar.flags import count

TRAIN_GPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
"""The examples are packaged with fxpar."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--processes", type=count, metavar="N", help="default: 4, or as many as there are GPUs")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="two or more (default: 20)")
    parser.add_argument(
        "--dump", type=Path, default=Path("dump"), metavar="FOLDER", help="where results are written (default: dump)"
    )
    parser.add_argument("others", nargs="*", metavar="OPTION", help="behind --: other options of examples/train_gpt.py")


def run(options: Namespace, console: Console) -> int:
    """Train, compare and say where the results are; returns the exit status."""
    num_processes = options.processes or _most_processes()
    console.print(
        f"{num_processes} processes train a small GPT for {options.steps} steps; then one process does. "
        "They import torch and compile before the first step, which takes the longest.",
        highlight=False,
        soft_wrap=True,
    )
    status = _launch(num_processes, _arguments(options))
    if status == 0:
        console.print(_results(options.dump), highlight=False, soft_wrap=True)
    return status


def _most_processes() -> int:
    import torch

    return min(4, torch.cuda.device_count() or 4)


def _arguments(options: Namespace) -> list[str]:
    dump = options.dump
    kept = ["--dump", str(dump), "--report", str(dump / "demo.json")]
    return ["--steps", str(options.steps), *kept, *options.others]


def _launch(num_processes: int, arguments: Sequence[str]) -> int:
    """Run the example by torchrun, in this process; returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks inherit it, and share the machine's cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # without gloo's lines about connections
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", "--nproc-per-node", str(num_processes), str(TRAIN_GPT), *arguments])
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


def _results(dump: Path) -> str:
    """What was written, and how to look at it."""
    graph = next(iter(sorted(dump.glob("rank0/*_partition_forward.stage0.py"))), dump)
    return "\n".join(
        [
            f"{dump / 'demo.json'} has the losses of both trainings, "
            f"{dump}/rank0 and so on what each rank made of the model, pass by pass.",
            f"What limits a step, and where its time goes, in a browser: xdg-open {dump / 'report.html'}",
            f"The first stage, as rank 0 runs it:  less {graph}",
            f"Schedules, predicted for this model: fxpar simulate {dump} --svg {dump / 'schedules.svg'}",
        ]
    )
