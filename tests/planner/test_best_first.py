"""A search that estimates few configurations by their graphs finds as fast a one as estimates of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from fxpar.hardware.cluster import Cluster, cluster_named
from fxpar.planner.analytic_estimate import analytic_estimate, matrices_of
from fxpar.planner.best_first import BestFirst
from fxpar.planner.configuration import Configuration
from fxpar.planner.search import plan
from fxpar.planner.step_model import Estimate

RANKS, ROWS = 4, 4096


class Net(nn.Module):
    """Matrices between elementwise operations: where they are small, these are most of what is computed."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(RANKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.softmax(torch.tanh(layer(x)), -1)
        return x.sum()


@dataclass(frozen=True, slots=True)
class Case:
    """A model of one width on two hosts of a cluster."""

    width: int
    dtype: torch.dtype
    cluster: Cluster
    axes: Sequence[str]
    microbatches: Sequence[int]

    def estimate_all(self) -> tuple[nn.Module, dict[Configuration, Estimate]]:
        """The model, and what its graphs say of every configuration."""
        with torch.device("meta"):
            model, batch = Net(self.width, self.dtype), (torch.zeros(ROWS, self.width, dtype=self.dtype),)
        found = plan(
            model,
            batch,
            self.cluster,
            RANKS,
            axes=self.axes,
            microbatches=self.microbatches,
            schedules=["1f1b"],
            most=1000,
            seconds=math.inf,
        )
        assert not found.left_out
        return model, {each.configuration: each.estimate for each in found.ranked}


CASES = {
    # Messages of a pipeline have latencies, and its bubbles hold more than products.
    "narrow, fast ranks": Case(64, torch.bfloat16, cluster_named("perlmutter"), ("pipe", "data"), (1, 8)),
    "wide, slow links": Case(1024, torch.float32, cluster_named("laptop"), ("pipe", "data", "x"), (4,)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_third_of_all_estimates_finds_what_all_of_them_find(case: Case) -> None:
    case = replace(case, cluster=replace(case.cluster, ranks_per_host=2))
    model, everything = case.estimate_all()
    search = BestFirst({each: analytic_estimate(matrices_of(model), ROWS, each, case.cluster) for each in everything})
    search.run(lambda configuration: [everything[configuration]], len(everything) // 3, math.inf, lambda _: None)
    assert len(search.estimates) == len(everything) // 3 == len(everything) - len(search.left_out)
    fastest = min(each.step_us for each in everything.values())
    assert min(everything[each].step_us for each in search.estimates) <= 1.02 * fastest, list(search.estimates)
