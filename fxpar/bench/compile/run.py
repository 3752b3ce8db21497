"""`fxpar bench compile`: from launch to second step on 4 ranks, against `torch.compile` in one process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from fxpar.bench.compile.scale import run_scale
from fxpar.bench.measure.interleaved import MOST_OTHERS
from fxpar.bench.measure.processors import ProcessorUse, share_of_others
from fxpar.bench.report import Bar, Report, Row, Say, at_most
from fxpar.calibrate.network import alternate

COLD_GOAL, DEPTH_GOAL = 0.7, 1.3
"""Of `torch.compile` in one process, and of a quarter of the layers in as many stages."""

DUMP_GOAL = 1.2
"""Of compiling without a dump: little enough to always write one."""

WARM_GOAL_S, EVALUATION_GOAL_S = 12.0, 3.0
"""What people wait for without doing something else."""

LAYERS, DEEP = 12, 48
REPEATS = 3
"""The median of three launches, of up to a minute each, tolerates one outlier."""


@dataclass(frozen=True, slots=True)
class Program:
    """What is launched: on `pipe` times `x` ranks, or, on one, by plain `torch.compile`; with a dump or without."""

    layers: int = LAYERS
    pipe: int = 1
    x: int = 1
    dumps: bool = False

    def command(self) -> list[str]:
        """The command line, by torchrun if there are several ranks."""
        ranks, module = self.pipe * self.x, "fxpar.bench.compile.program"
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        sizes = {"layers": self.layers, "pipe": self.pipe, "x": self.x}
        return [sys.executable, *run, "-m", module, *(f"--{name}={size}" for name, size in sizes.items())]


PROGRAMS: Mapping[str, Program] = {
    "fxpar": Program(pipe=2, x=2),
    "torch.compile": Program(),
    "fxpar, 48 layers": Program(DEEP, pipe=2, x=2),
    "fxpar, dumping": Program(pipe=2, x=2, dumps=True),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """The seconds of each phase, in order; the share of the processors that others took; the memory of rank 0."""

    phases: Mapping[str, float]
    others: float
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Until the second step was done."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != "evaluation")

    @property
    def compiling_s(self) -> float:
        """Of what fxpar compiles in, up to the end of the first step."""
        return self.phases["distribute"] + self.phases["first_step"]


def run(say: Say, mode: str | None = None) -> Report:
    """Takes some 8 minutes on four ranks; or, in mode "scale", 3 minutes on ranks that do not exist."""
    if mode == "scale":
        return run_scale(say)
    launches: dict[tuple[str, str], list[Launch]] = {}
    for name in alternate(list(PROGRAMS), REPEATS):
        with TemporaryDirectory() as folder:
            for caches in ("cold", "warm"):
                found = launches.setdefault((name, caches), [])
                say(f"launching {name} with {caches} caches, round {len(found) + 1} of {REPEATS}")
                found.append(launch(PROGRAMS[name], Path(folder)))
    return Report(list(_rows(launches)), list(_bars(launches)))


def launch(program: Program, caches: Path) -> Launch:
    """Run the program once, with Inductor's and fxpar's caches in the folder."""
    environment = os.environ | {
        "PYTHONDONTWRITEBYTECODE": "",  # developers set it, and fxpar would be compiled anew in each rank; torch is not
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FXPAR_CACHE_DIR": str(caches / "fxpar"),
        "FXPAR_DUMP": str(caches / "dump") if program.dumps else "",
        "OMP_NUM_THREADS": "1",
    }
    before, start = ProcessorUse.now(with_children=True), time.time()
    done = subprocess.run(program.command(), env=environment, capture_output=True, text=True, check=True)
    used = ProcessorUse.now(with_children=True).since(before)
    printed = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    ends = {"": start, **printed["ends"]}
    phases = {later: ends[later] - ends[earlier] for earlier, later in pairwise(ends)}
    return Launch(phases, share_of_others([used]), printed["peak_bytes"])


def _rows(launches: Mapping[tuple[str, str], Sequence[Launch]]) -> Iterator[Row]:
    """The medians of each program's launches; phases that it lacks take no time."""
    phases = list(dict.fromkeys(phase for found in launches.values() for phase in found[0].phases))
    phases.sort(key=list(launches["fxpar", "cold"][0].phases).index)
    for (name, caches), found in launches.items():
        yield {
            "program": name,
            "caches": caches,
            "ranks": PROGRAMS[name].pipe * PROGRAMS[name].x,
            **{f"{phase}_s": statistics.median(each.phases.get(phase, 0.0) for each in found) for phase in phases},
            "to_second_step_s": _median(found),
            "rank_0_mb": statistics.median(each.peak_bytes for each in found) / 1e6,
            "others": max(each.others for each in found),
        }


def _bars(launches: Mapping[tuple[str, str], Sequence[Launch]]) -> Iterator[Bar]:
    ours, theirs, deep, dumping = PROGRAMS
    cold = {name: launches[name, "cold"] for name in PROGRAMS}
    ratio = _ratio([each.seconds for each in cold[ours]], [each.seconds for each in cold[theirs]])
    disturbed = all(each.others > MOST_OTHERS for found in launches.values() for each in found)
    what = "cold launch to second step on 4 ranks / torch.compile's in one process"
    yield at_most(what, ratio, COLD_GOAL, disturbed=disturbed)
    warm_s = _median(launches[ours, "warm"])
    yield at_most("warm launch to second step, seconds", warm_s, WARM_GOAL_S, disturbed=disturbed)
    for caches in ("cold", "warm"):
        evaluation = statistics.median(each.phases["evaluation"] for each in launches[ours, caches])
        yield at_most(f"{caches} first evaluation, seconds", evaluation, EVALUATION_GOAL_S, disturbed=disturbed)
        depth = _median(launches[deep, caches]) / _median(launches[ours, caches])
        yield at_most(f"{caches} launch with 48 layers / with 12", depth, DEPTH_GOAL, disturbed=disturbed)
    ratio = _ratio([each.compiling_s for each in cold[dumping]], [each.compiling_s for each in cold[ours]])
    yield at_most("cold compilation with a dump / without", ratio, DUMP_GOAL, disturbed=disturbed)


def _ratio(seconds: Sequence[float], of_others: Sequence[float]) -> float:
    """The median of the ratios of all rounds."""
    return statistics.median(mine / other for mine, other in zip(seconds, of_others, strict=True))


def _median(launches: Sequence[Launch]) -> float:
    return statistics.median(each.seconds for each in launches)
