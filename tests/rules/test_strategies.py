"""Which strategies an op may take."""

from __future__ import annotations

import torch
from test_einsum import MM

from fxpar.ir.layout import REPLICATE, Shard
from fxpar.rules import rule_for
from fxpar.rules.rule import Operand, Strategy
from fxpar.rules.strategies import admissible, candidate_shards, replicated


def test_candidates_cut_a_dim_evenly_from_its_start() -> None:
    assert candidate_shards((4, 6, 5, 1, 0), 2) == [Shard(0, 2), Shard(1, 2)]


def test_an_op_without_a_rule_is_replicated() -> None:
    assert admissible(MM, None, [(Operand("input", 0), Shard(0, 2))]) == [replicated(MM)]


def test_seeds_that_lead_to_the_same_strategy_give_it_once() -> None:
    seeds = [
        (Operand("input", 0), Shard(0, 2)),
        (Operand("output", 0), Shard(0, 2)),
        (Operand("input", 0), Shard(0, 4)),
    ]
    found = admissible(MM, rule_for(torch.ops.aten.mm.default), seeds)
    assert found[0] == replicated(MM)
    assert [s for s in found if s.divides_work] == [
        Strategy((Shard(0, 2), REPLICATE), (Shard(0, 2),)),
        Strategy((Shard(0, 4), REPLICATE), (Shard(0, 4),)),
    ]
