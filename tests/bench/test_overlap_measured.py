"""The overlap benchmark runs every variant and peer, and holds them against their goals."""

from __future__ import annotations

import math

import torch

from fxpar.bench.measure.interleaved import Timing, timings_of_ranks
from fxpar.bench.overlap.cases import ALL_OVERLAPS, CASES, COMPUTE_ALONE, NO_OVERLAP, VARIANTS
from fxpar.bench.overlap.peers import DDP, FSDP2
from fxpar.bench.overlap.run import overlap_rows
from fxpar.config import read_options
from fxpar.ir.overlap_options import OVERLAP_RULES
from fxpar.world.launch import run_ranks
from tests.bench.run_overlap import SMALL_CHAIN, bucket_sizes, reduce_in_silence, run_small

SHARDED = ("weights gathered again", "weights kept")


def test_every_variant_and_peer_of_a_model_runs() -> None:
    timings = timings_of_ranks(run_ranks(2, run_small, SMALL_CHAIN))
    rows = list(overlap_rows(SMALL_CHAIN, math.inf, timings))
    names = [str(row["variant"]) for row, _ in rows[:-1]]
    peers = [name for name in names if name.startswith((DDP, FSDP2))]
    assert names == [*peers, *VARIANTS, COMPUTE_ALONE]
    assert len([name for name in peers if name.startswith(DDP)]) == 4, "buckets of several sizes"
    assert [name for name in peers if name.startswith(FSDP2)] == [
        "FSDP2, weights gathered again",
        "FSDP2, weights kept",
    ]
    _, bars = rows[-1]
    assert [bar.goal for bar in bars] == [claim.goal for claim in SMALL_CHAIN.claims]


def test_ddp_reduces_in_buckets_of_the_size_it_is_told() -> None:
    one_weight_each, two_each = run_ranks(2, bucket_sizes)[0]
    assert (one_weight_each, two_each) == ([256] * 4, [512] * 2)


def test_exposed_is_what_a_step_takes_besides_computing_and_a_peer_is_its_fastest_setting() -> None:
    (case, *_) = CASES
    peers = {"DDP, one way": 3.0, "DDP, another": 1.5, "FSDP2, one way": 1.8, "FSDP2, another": 4.5}
    seconds = peers | dict.fromkeys(VARIANTS, 1.5) | {NO_OVERLAP: 2.0, COMPUTE_ALONE: 1.0}
    *rows, (held, bars) = overlap_rows(
        case, math.inf, {name: [Timing(took, others=0.0)] for name, took in seconds.items()}
    )
    exposed_ms = {row["variant"]: row["exposed_communication_ms"] for row, _ in rows}
    assert exposed_ms == {name: (took - 1.0) * 1e3 for name, took in seconds.items()}
    assert [bar.value for bar in bars] == [2.0 / 1.5, 1.8 / 1.5, 1.0]
    assert (held["best DDP"], held["best FSDP2"]) == ("DDP, another", "FSDP2, one way")


def test_variants_add_one_rule_after_another() -> None:
    *some, last = VARIANTS.values()
    assert some == [{"overlap": OVERLAP_RULES[:number]} for number in range(len(OVERLAP_RULES))]
    assert last == {"overlap": True} and list(VARIANTS)[-1] == ALL_OVERLAPS


def test_every_claim_is_of_what_its_case_runs() -> None:
    for case in CASES:
        assert {name for claim in case.claims for name in (claim.faster, claim.slower)} <= {
            *case.variants,
            *((DDP, FSDP2) if case.layers else ()),
        }
        for options in case.variants.values():
            read_options(options)


def test_on_a_silenced_mesh_nobody_waits_for_others() -> None:
    (found,), nothing = run_ranks(2, reduce_in_silence)
    assert torch.equal(found, torch.ones(3))
    assert not nothing
