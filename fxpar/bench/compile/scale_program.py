"""The program that plans a step for ranks that do not exist, makes the graphs of one of them, and prints the times.

python -m fxpar.bench.compile.scale_program --model llama-405b --layers 126 --pipe 16 --data 8 --z 8 --x 8
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fxpar.bench.compile.scale import PASSES, PLANNING, PREPARING
from fxpar.bench.compile.scale_models import SMALL, scale_model
from fxpar.build.planned_stages import plan_question
from fxpar.cache.encode import encode
from fxpar.compiler import compile_stages, divide_stage, join_stages, localize_stage, plan_stages
from fxpar.config import Options
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.costs.stage_times import estimate_costs
from fxpar.garbage_collection import garbage_collection_paused
from fxpar.hardware.cluster import read_cluster
from fxpar.hardware.machine import peak_process_bytes
from fxpar.ir.layout import AXES
from fxpar.ir.plan import Plan
from fxpar.ir.stage import PlannedStage
from fxpar.ir.storage_options import AUTO, storage_choices
from fxpar.make_plan import parameters_of
from fxpar.model.buffers import assign_buffers
from fxpar.model.distribution import Distribution
from fxpar.model.logical import install
from fxpar.pass_log import PassLog
from fxpar.passes.settle_capture import settle_capture
from fxpar.passes.stages.balance_stages import balance_stages
from fxpar.passes.stages.pipeline_messages import pipeline_messages
from fxpar.planner.imagined_mesh import imagined_mesh, imagined_world
from fxpar.progress.phases import phase, watching
from fxpar.resharding.pipeline import Pipeline, lookahead_on
from fxpar.schedule import Schedule, check_programs, lower
from fxpar.schedule.choose_schedule import choose_placement, choose_schedule

_OTHER = "between phases"
CLUSTER, SCHEDULE = "dgx-h100", "eager-1f1b"


class Stopwatch:
    """Watches phases: the seconds of processor time of each of `listed`, without those of listed phases within it."""

    def __init__(self, listed: Collection[str]) -> None:
        self.seconds = {"import": time.process_time()}
        self._listed, self._current, self._since = listed, "import", time.process_time()

    def __call__(self, phases: tuple[str, ...]) -> None:
        """See `fxpar.progress.phases.Watch`."""
        now = time.process_time()
        self.seconds[self._current] = self.seconds.get(self._current, 0.0) + now - self._since
        self._current, self._since = next((name for name in reversed(phases) if name in self._listed), _OTHER), now


def main() -> None:
    """Print one JSON object: the seconds of each part, in order, and bytes of memory."""
    watch = Stopwatch({*PREPARING, *PLANNING, *PASSES})
    options = parse_options()
    with watching(watch), garbage_collection_paused():  # as launches do
        reshards = run(options)
    seconds = {part: taken for part, taken in watch.seconds.items() if part != _OTHER}
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_process_bytes(), "reshards": reshards}))


def run(options: argparse.Namespace) -> int:
    """Plan a step, and make the graphs of one rank; returns the number of values that cross between stages."""
    sizes: dict[str, int] = {axis: getattr(options, axis) for axis in AXES}
    with ExitStack() as world:
        with phase("init_mesh"):
            world.enter_context(imagined_world(math.prod(sizes.values())))
            mesh = imagined_mesh(sizes, read_cluster(CLUSTER))
        with phase("make_model"):
            model, inputs = scale_model(options.model, options.layers, options.kinds, options.microbatches)
        with phase("make_plan"):
            distribution = Distribution.of(model, mesh, microbatches=options.microbatches)
            install(distribution)
            stages = plan(distribution, inputs)
        pipeline, schedule = join(distribution, stages)
        distribution.mesh = replace(mesh, rank=mesh.rank_at({"pipe": mesh.pipe // 2}))
        compile_rank(distribution, stages, schedule)
    return len(pipeline.reshards)


def plan(distribution: Distribution, inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[PlannedStage, ...]:
    """What `distribute` does before it makes shards, on the rank that plans for all: with one stage per pipe rank."""
    mesh = distribution.mesh
    distribution.placement = choose_placement(SCHEDULE, mesh.pipe, mesh.pipe)
    capture = settle_capture(distribution.tracer.capture(mesh.device_type, inputs), distribution)
    boundaries = balance_stages(capture, mesh.pipe, prices_of(mesh))
    stages = plan_stages(capture, distribution, boundaries)
    with phase("keep"):
        plan_question(capture, distribution, boundaries)
        encode(stages)
    assign_buffers(capture, stages, distribution)
    parameters = parameters_of(stages, distribution)
    distribution.plan = Plan(
        boundaries, mesh.sizes, distribution.microbatches, SCHEDULE, parameters, distribution.placement
    )
    return stages


def join(distribution: Distribution, stages: Sequence[PlannedStage]) -> tuple[Pipeline, Schedule]:
    """What every rank does for all: the transfers between stages, and the programs of all pipe ranks, checked."""
    mesh = distribution.mesh
    options = Options()
    pipeline = join_stages(stages, distribution, options.strategy, options.algorithm, PassLog())
    costs = estimate_costs(stages, pipeline, mesh, distribution.placement)
    with phase("programs"):
        schedule = choose_schedule(SCHEDULE, costs, mesh.pipe, distribution.microbatches)
        programs = lower(schedule, pipeline.edges, lookahead_on(mesh))
        messages = pipeline_messages(stages, [reshard.crossing for reshard in pipeline.reshards])
    check_programs(programs, schedule, pipeline.edges, messages)
    return pipeline, schedule


def compile_rank(distribution: Distribution, stages: Sequence[PlannedStage], schedule: Schedule) -> None:
    """What a rank does for its own stages, but for lowering."""
    mesh, overlap = distribution.mesh, Options().overlapping
    own = [stages[index] for index in schedule.stages_of(mesh.coordinate["pipe"])]
    local = [localize_stage(stage, distribution) for stage in own]
    storage = storage_choices(AUTO, AUTO, distribution.microbatches, mesh.z)[0]
    graphs = [
        divide_stage(stage, graph, distribution, schedule, storage, overlap=overlap)
        for stage, graph in zip(own, local, strict=True)
    ]
    graphs = compile_stages(graphs, GraphModel(mesh, prices_of(mesh)), True, overlap)
    with phase("keep_program"):
        encode([each.run for each in graphs])


def parse_options() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=SMALL)
    for name, count in {"layers": 12, "kinds": 1, "microbatches": 16, **dict.fromkeys(AXES, 1)}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    return parser.parse_args()


if __name__ == "__main__":
    main()
