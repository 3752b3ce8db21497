"""The overlap benchmark runs every variant and peer, and holds them against their goals."""

from __future__ import annotations

import math

import torch

from fxpar.bench.overlap import overlap_rows
from fxpar.bench.overlap_cases import ALL_OVERLAPS, CASES, COMPUTE_ALONE, NO_OVERLAP, PEERS, VARIANTS
from fxpar.bench.turns import Turn, turns_of
from fxpar.config import read_options
from fxpar.launch import run_ranks
from fxpar.overlap import OVERLAP_RULES
from tests.bench.run_overlap import SMALL_CHAIN, reduce_in_silence, run_small


def test_every_variant_and_peer_of_a_model_runs() -> None:
    turns = turns_of(run_ranks(2, run_small, SMALL_CHAIN))
    rows = list(overlap_rows(SMALL_CHAIN, math.inf, turns))
    assert [row["variant"] for row, _ in rows[:-1]] == [*PEERS, *VARIANTS, COMPUTE_ALONE]
    _, bars = rows[-1]
    assert [bar.goal for bar in bars] == [claim.goal for claim in SMALL_CHAIN.claims]


def test_exposed_communication_is_what_a_step_takes_besides_computing() -> None:
    (case, *_) = CASES
    seconds = dict.fromkeys([*PEERS, *VARIANTS], 1.5) | {NO_OVERLAP: 2.0, COMPUTE_ALONE: 1.0}
    *rows, (_, bars) = overlap_rows(case, math.inf, {name: [Turn(took, others=0.0)] for name, took in seconds.items()})
    exposed_ms = {row["variant"]: row["exposed_communication_ms"] for row, _ in rows}
    assert exposed_ms == {name: (took - 1.0) * 1e3 for name, took in seconds.items()}
    assert [bar.value for bar in bars] == [2.0 / 1.5, 1.0, 1.0]


def test_variants_add_one_rule_after_another() -> None:
    *some, last = VARIANTS.values()
    assert some == [{"overlap": OVERLAP_RULES[:number]} for number in range(len(OVERLAP_RULES))]
    assert last == {"overlap": True} and list(VARIANTS)[-1] == ALL_OVERLAPS


def test_every_claim_is_of_what_its_case_runs() -> None:
    for case in CASES:
        assert {name for claim in case.claims for name in (claim.faster, claim.slower)} <= {
            *case.variants,
            *case.against,
        }
        for options in case.variants.values():
            read_options(options)


def test_on_a_silenced_mesh_nobody_waits_for_others() -> None:
    (found,), nothing = run_ranks(2, reduce_in_silence)
    assert torch.equal(found, torch.ones(3))
    assert not nothing
