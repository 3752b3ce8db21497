"""Training on a mesh equals training on one process: every model, mesh, schedule, lowering, number of microbatches."""

from __future__ import annotations

import itertools
import math

import pytest

from fxpar.schedule import SCHEDULE_NAMES
from fxpar.world.launch import run_ranks
from tests.support.parity import Run, check_runs, check_runs_between_hosts, check_same_bits

MESHES = [
    {},
    {"pipe": 2},
    {"pipe": 4},
    {"x": 2},
    {"data": 2},
    {"pipe": 2, "x": 2},
    {"pipe": 2, "data": 2},
    {"data": 2, "x": 2},
]

LANGUAGE_MODELS = ["gpt", "gpt2", "llama"]

# Where Inductor compiles: one mesh per model, so that every kind of collective and transfer is met.
INDUCTOR = {"gpt": {"pipe": 2, "x": 2}, "gpt2": {"z": 2}, "llama": {"x": 2}}

MICROBATCHES = [1, 2, 4, 8]


def runs_on(turn: int) -> list[Run]:
    """A run of each model on a mesh: the schedules are dealt out to the models, to each mesh the next way round.

    So no pair of a mesh, a model, a schedule and a number of microbatches is missed; the test below counts them.
    """
    return [
        Run(
            subject,
            MESHES[turn],
            MICROBATCHES[(turn + place) % len(MICROBATCHES)],
            schedules=tuple(
                schedule
                for card, schedule in enumerate(SCHEDULE_NAMES)
                if (card + turn) % len(LANGUAGE_MODELS) == place
            ),
        )
        for place, subject in enumerate(LANGUAGE_MODELS)
    ]


def test_every_pair_of_mesh_model_schedule_and_microbatches_is_trained() -> None:
    runs = [run for turn in range(len(MESHES)) for run in runs_on(turn)]
    cases = [(str(run.mesh), run.subject, schedule, run.microbatches) for run in runs for schedule in run.schedules]
    choices = ([str(mesh) for mesh in MESHES], LANGUAGE_MODELS, SCHEDULE_NAMES, MICROBATCHES)
    for one, other in itertools.combinations(range(len(choices)), 2):
        if {one, other} == {0, 3}:
            continue  # a mesh has three runs, of three numbers of microbatches
        met = {(case[one], case[other]) for case in cases}
        assert met == set(itertools.product(choices[one], choices[other]))
    in_stages = {(run.subject, schedule) for run in runs if "pipe" in run.mesh for schedule in run.schedules}
    assert in_stages == set(itertools.product(LANGUAGE_MODELS, SCHEDULE_NAMES)), "each on several stages at least once"


# What happens along these axes happens on other meshes, too, and a quick model trains on them in any case.
ALONE = [{}, {"pipe": 2}, {"x": 2}, {"data": 2}, {"data": 2, "x": 2}]
TURNS = [
    pytest.param(turn, id=str(mesh), marks=[pytest.mark.every_mesh] if mesh in ALONE else [])
    for turn, mesh in enumerate(MESHES)
]


@pytest.mark.parametrize("turn", TURNS)
def test_training_equals_one_process(turn: int) -> None:
    run_ranks(math.prod(MESHES[turn].values()), check_runs, runs_on(turn))


def test_training_a_unet_equals_one_process() -> None:
    """On four stages, which its skip connections lead past, it meets every schedule in the test below."""
    run_ranks(2, check_runs, [Run("unet", {"x": 2}, 2, schedules=("gpipe",))])


SAME_BITS = {"gpt": {"pipe": 2, "x": 2}, "unet": {"pipe": 4}}


@pytest.mark.parametrize(("subject", "sizes"), SAME_BITS.items(), ids=SAME_BITS)
def test_every_schedule_gives_the_same_bits(subject: str, sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_same_bits, subject, sizes, 4)


@pytest.mark.parametrize("subject", LANGUAGE_MODELS)
def test_training_equals_one_process_when_inductor_compiles(subject: str) -> None:
    sizes = INDUCTOR[subject]
    run = Run(subject, sizes, microbatches=2, lowering="inductor", schedules=("eager-1f1b",), fuse="always")
    run_ranks(math.prod(sizes.values()), check_runs, [run])


def test_training_equals_one_process_where_every_stage_is_a_host() -> None:
    schedules = ("1f1b", "zb-h1", "eager-1f1b", "zb-h2", "eager-1f1b-delayed")
    run = Run("gpt", {"pipe": 4}, microbatches=4, steps=1, schedules=schedules)
    run_ranks(4, check_runs_between_hosts, [run], 1)


BETWEEN_HOSTS = {1: ["broadcast", "send_recv", "global_allgather"], 2: ["broadcast", "local_allgather"]}


@pytest.mark.parametrize(("ranks_per_host", "strategies"), BETWEEN_HOSTS.items(), ids=map(str, BETWEEN_HOSTS))
def test_training_equals_one_process_by_every_strategy_between_hosts(
    ranks_per_host: int, strategies: list[str]
) -> None:
    runs = [Run("gpt", {"pipe": 2, "x": 2}, 4, schedules=("eager-1f1b",), strategy=each) for each in strategies]
    run_ranks(4, check_runs_between_hosts, runs, ranks_per_host)


STORED = {
    "in the graph": Run("gpt", {"z": 2}, 1, schedules=("1f1b",)),
    "once per step, of sizes that do not divide": Run("chain", {"z": 3}, 4, schedules=("1f1b",)),
    "beside x": Run("gpt2", {"z": 2, "x": 2}, 4, schedules=("1f1b",), gather_weights="microbatch"),
    "tied to another stage": Run(
        "gpt", {"pipe": 2, "z": 2}, 4, schedules=("eager-1f1b", "zb-h1"), reduce_gradients="microbatch"
    ),
}


@pytest.mark.parametrize("case", STORED)
def test_training_equals_one_process_where_weights_are_stored_in_shards(case: str) -> None:
    """Each of the ways to gather weights and to reduce gradients, in turn."""
    run_ranks(math.prod(STORED[case].mesh.values()), check_runs, [STORED[case]])


@pytest.mark.parametrize("axis", ["data", "z"])
def test_training_equals_one_process_where_stages_share_several_parameters(axis: str) -> None:
    run_ranks(4, check_runs, [Run("shared embedder", {"pipe": 2, axis: 2}, 2, schedules=("eager-1f1b", "zb-h1"))])


PLANES = {
    "y and x": [
        Run("llama", {"y": 2, "x": 2}, 2, schedules=("gpipe",), steps=1, hinted=False),
        Run("chain", {"y": 2, "x": 2}, 4, schedules=("zb-h1",), steps=1),
    ],
    "y alone": [Run("gpt2", {"y": 2}, 2, schedules=("1f1b",), steps=1, hinted=False)],
}


@pytest.mark.parametrize("case", PLANES)
def test_training_equals_one_process_where_weights_are_used_in_shards_over_y_and_x(case: str) -> None:
    """Found by cost alone, beside hints for x, and of sizes that do not divide."""
    runs = PLANES[case]
    run_ranks(math.prod(runs[0].mesh.values()), check_runs, runs)
