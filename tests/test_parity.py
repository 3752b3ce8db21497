"""Training on a mesh equals training on one process: every model, mesh, schedule, lowering, number of microbatches."""

from __future__ import annotations

import math

import pytest

from fxpar.launch import run_ranks
from tests.parity import Run, check_runs, check_runs_between_hosts, check_same_bits

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
INDUCTOR = {"gpt": {"pipe": 2, "x": 2}, "gpt2": {"x": 2}, "llama": {"data": 2}}

MICROBATCHES = [1, 2, 4, 8]


@pytest.mark.parametrize(("turn", "sizes"), list(enumerate(MESHES)), ids=[str(mesh) for mesh in MESHES])
def test_training_equals_one_process_under_every_schedule(turn: int, sizes: dict[str, int]) -> None:
    """Each model meets each number of microbatches on two of the meshes."""
    runs = [Run(subject, sizes, MICROBATCHES[(turn + i) % 4]) for i, subject in enumerate(LANGUAGE_MODELS)]
    run_ranks(math.prod(sizes.values()), check_runs, runs)


UNET = [({"pipe": 2}, 1, "1f1b"), ({"pipe": 2, "data": 2}, 2, "eager-1f1b"), ({"data": 2}, 8, "gpipe")]


@pytest.mark.parametrize(("sizes", "microbatches", "schedule"), UNET, ids=[str(sizes) for sizes, *_ in UNET])
def test_training_a_unet_equals_one_process(sizes: dict[str, int], microbatches: int, schedule: str) -> None:
    """Its skip connections lead past other stages. On four stages it meets every schedule in the test below."""
    run = Run("unet", sizes, microbatches, schedules=(schedule,))
    run_ranks(math.prod(sizes.values()), check_runs, [run])


SAME_BITS = {"gpt": {"pipe": 2, "x": 2}, "unet": {"pipe": 4}}


@pytest.mark.parametrize(("subject", "sizes"), SAME_BITS.items(), ids=SAME_BITS)
def test_every_schedule_gives_the_same_bits(subject: str, sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check_same_bits, subject, sizes, 4)


@pytest.mark.parametrize("subject", LANGUAGE_MODELS)
def test_training_equals_one_process_when_inductor_compiles(subject: str) -> None:
    sizes = INDUCTOR[subject]
    run = Run(subject, sizes, microbatches=2, lowering="inductor", schedules=("eager-1f1b",))
    run_ranks(math.prod(sizes.values()), check_runs, [run])


def test_training_equals_one_process_where_every_stage_is_a_host() -> None:
    runs = [Run(subject, {"pipe": 4}, microbatches=4, steps=1) for subject in LANGUAGE_MODELS]
    run_ranks(4, check_runs_between_hosts, runs, 1)


BETWEEN_HOSTS = {
    1: [("gpt", "broadcast"), ("gpt", "send_recv"), ("gpt", "global_allgather")],
    2: [("llama", "broadcast"), ("gpt", "local_allgather")],
}


@pytest.mark.parametrize(("ranks_per_host", "kinds"), BETWEEN_HOSTS.items(), ids=map(str, BETWEEN_HOSTS))
def test_training_equals_one_process_by_every_strategy_between_hosts(
    ranks_per_host: int, kinds: list[tuple[str, str]]
) -> None:
    runs = [
        Run(subject, {"pipe": 2, "x": 2}, 4, schedules=("eager-1f1b",), strategy=strategy)
        for subject, strategy in kinds
    ]
    run_ranks(4, check_runs_between_hosts, runs, ranks_per_host)
