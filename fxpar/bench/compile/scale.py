"""How the time of planning and of the passes grows: with layers, kinds of layers, stages, ranks, and microbatches."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fxpar.bench.compile.scale_models import GPT_80B, LLAMA_405B, SMALL
from fxpar.bench.report import Bar, Report, Row, Say, at_most

PREPARING = ("init_mesh", "make_model")
"""What depends on no pass."""

PLANNING = (
    "capture",
    "keep_all_rows",
    "take_out_parameter_changes",
    "copy_changed_arguments",
    "total_over_batch",
    "balance_stages",
    "plan_stages",
    "split_stages",
    "trace_joint",
    "cast_gradients",
    "logical_random",
    "decompose_for_sharding",
    "propagate_layouts",
    "shard_storage",
    "keep",
    "make_plan",
)
"""The phases of `distribute` on the rank that plans for all, up to the shards."""

PASSES = (
    "insert_reshards",
    "estimate_costs",
    "programs",
    "check_programs",
    "localize_stage",
    "divide_stage",
    "compile_stages",
    "keep_program",
)
"""The phases of every rank after that, up to the graphs that are to be lowered."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is planned, for `pipe` stages."""

    model: str = SMALL
    layers: int = 12
    kinds: int = 1
    pipe: int = 4
    data: int = 1
    z: int = 1
    x: int = 2
    microbatches: int = 16

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return self.pipe * self.data * self.z * self.x


BASE = Configuration()
LAYERS = [replace(BASE, layers=layers) for layers in (4, 12, 96)]
KINDS = [replace(BASE, layers=24, kinds=kinds) for kinds in (3, 12)]
STAGES = [replace(BASE, layers=64, pipe=pipe) for pipe in (2, 64)]
RANKS = [BASE, replace(BASE, data=8, z=4, x=8), replace(BASE, data=32, z=8, x=8)]
MICROBATCHES = [replace(BASE, pipe=8, microbatches=count) for count in (4, 256)]

# x is within a host of 8 GPUs. The authors of Llama 3 train with x=8 and 16 stages, too (Dubey et al., Table 4).
LLAMA = Configuration(LLAMA_405B, layers=126, pipe=16, data=8, z=8, x=8)
GPT = Configuration(GPT_80B, layers=42, pipe=8, data=8, z=2, x=8)

PLAN_GOAL_S, RANK_GOAL_S, MEMORY_GOAL_GB, GPT_GOAL_S = 90.0, 60.0, 8.0, 25.0
"""What people wait for at a launch on thousands of GPUs without thinking of it as a part of training."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of processor time of each part, and the memory."""

    seconds: Mapping[str, float]
    peak_bytes: int

    @property
    def planning_s(self) -> float:
        """Of what one rank does for all."""
        return sum(self.seconds.get(part, 0.0) for part in PLANNING)

    @property
    def passes_s(self) -> float:
        """Of what each rank does after that."""
        return sum(self.seconds.get(part, 0.0) for part in PASSES)

    @property
    def growing_s(self) -> float:
        """Of all that a model or a mesh may prolong."""
        return self.planning_s + self.passes_s


def run_scale(say: Say) -> Report:
    """Takes some 3 minutes."""
    found: dict[Configuration, Measured] = {}
    for configuration in dict.fromkeys([*LAYERS, *KINDS, *STAGES, *RANKS, *MICROBATCHES, GPT, LLAMA]):
        say(f"planning {configuration}")
        found[configuration] = measure(configuration)
    return Report([_row(configuration, measured) for configuration, measured in found.items()], list(_bars(found)))


def measure(configuration: Configuration) -> Measured:
    """The times of a configuration, in a process of its own."""
    names = ("model", "layers", "kinds", "pipe", "data", "z", "x", "microbatches")
    flags = [f"--{name}={getattr(configuration, name)}" for name in names]
    command = [sys.executable, "-m", "fxpar.bench.compile.scale_program", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return Measured(printed["seconds"], printed["peak_bytes"])


def _row(configuration: Configuration, measured: Measured) -> Row:
    return {
        "model": configuration.model,
        "layers": configuration.layers,
        "kinds": configuration.kinds,
        "stages": configuration.pipe,
        "ranks": configuration.ranks,
        "microbatches": configuration.microbatches,
        **{f"{part}_s": measured.seconds.get(part, 0.0) for part in ("import", *PLANNING, *PASSES)},
        "planning_s": measured.planning_s,
        "passes_s": measured.passes_s,
        "peak_gb": measured.peak_bytes / 1e9,
    }


def _bars(found: Mapping[Configuration, Measured]) -> Iterator[Bar]:
    llama, gpt = found[LLAMA], found[GPT]
    yield at_most("Llama 405B on 8,192 ranks: planning, seconds", llama.planning_s, PLAN_GOAL_S)
    yield at_most("Llama 405B on 8,192 ranks: passes of one rank, seconds", llama.passes_s, RANK_GOAL_S)
    yield at_most("Llama 405B on 8,192 ranks: memory, GB", llama.peak_bytes / 1e9, MEMORY_GOAL_GB)
    yield at_most("GPT-80B on 1,024 ranks: planning, seconds", gpt.planning_s, GPT_GOAL_S)
    yield _growth(found, KINDS[0], KINDS[-1], "kinds", 1.0)
    for first, last, what in (
        (LAYERS[1], LAYERS[-1], "layers"),
        (STAGES[0], STAGES[-1], "pipe"),
        (RANKS[0], RANKS[-1], "ranks"),
        (MICROBATCHES[0], MICROBATCHES[-1], "microbatches"),
    ):
        yield _growth(found, first, last, what, 0.9)


def _growth(
    found: Mapping[Configuration, Measured], first: Configuration, last: Configuration, what: str, goal: float
) -> Bar:
    """The exponent by which the time grows: 1 is linear growth."""
    few, many = getattr(first, what), getattr(last, what)
    exponent = math.log(found[last].growing_s / found[first].growing_s) / math.log(many / few)
    name = {"pipe": "stages", "kinds": "kinds of layers"}.get(what, what)
    return at_most(f"exponent of the time from {few} to {many} {name}", exponent, goal)
