"""Mixtures of experts, as people write them as loops over experts, train as on one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import AllRowsWarning
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import compare_copy

mesh = pytest.fixture(mesh_of_one_process)

WIDTH, EXPERTS, CHOSEN, VOCABULARY, ROWS, LENGTH = 16, 4, 2, 32, 8, 6

Loop = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]
"""Of experts, tokens (N, WIDTH), and for each of CHOSEN experts its weight and its number (N, CHOSEN)."""


def by_columns(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A mask of numbers for each expert, a row for each choice; results are added up by the indices of tokens."""
    found = torch.zeros_like(x)
    masks = functional.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for number, expert in enumerate(experts):
        choice, token = torch.where(masks[number])
        given = x[None, token].reshape(-1, WIDTH)
        found.index_add_(0, token, (expert(given) * weights[token, choice, None]).to(x.dtype))
    return found


def by_rows(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A mask of booleans for each expert, and results that are added in place."""
    found = torch.zeros_like(x)
    masks = (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
    for mask, expert in zip(masks, experts, strict=True):
        token, choice = torch.where(mask)
        found[token] += weights[token, choice, None] * expert(x[token])
    return found


def by_masks(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The mask itself is the index."""
    found = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mask = (chosen == number).any(-1)
        found[mask] += expert(x[mask]) * (weights * (chosen == number)).sum(-1)[mask].unsqueeze(-1)
    return found


def of_repeated(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A token for each choice, assigned once."""
    repeated, flat = x.repeat_interleave(CHOSEN, dim=0), chosen.view(-1)
    found = torch.empty_like(repeated)
    for number, expert in enumerate(experts):
        found[flat == number] = expert(repeated[flat == number])
    return (found.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def of_the_first(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One expert each; all tokens are found, then all are computed, then all are assigned."""
    found = x.new_zeros(x.shape)
    places = [torch.eq(chosen[:, 0], number).nonzero(as_tuple=True)[0] for number in range(EXPERTS)]
    results = [expert(x[places[number], :]) for number, expert in enumerate(experts)]
    for number in range(EXPERTS):
        found[places[number], :] = results[number]
    return found * weights[:, :1]


def by_parts(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Tokens sorted by their experts, and split by the numbers that each has."""
    flat = chosen.view(-1)
    order = flat.argsort(stable=True)
    sizes = functional.one_hot(flat, EXPERTS).sum(0).tolist()
    parts = [expert(part) for expert, part in zip(experts, x[order // CHOSEN].split(sizes), strict=True)]
    first, second = torch.cat(parts).chunk(2, dim=-1)
    found = torch.cat([first, second], dim=-1) * weights.reshape(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, order // CHOSEN, found)


def if_there_are_any(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Experts without tokens are skipped, as their counts tell; the results of others are cut in two and joined."""
    found = torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for number, expert in enumerate(experts):
        if counts[number] == 0:
            continue
        token, choice = torch.where(chosen == number)
        first, second = expert(x[token]).chunk(2, dim=-1)
        found[token] += torch.cat([first, second.tanh()], dim=-1) * weights[token, choice, None]
    return found


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (by_columns, by_rows, by_masks, by_parts, if_there_are_any, of_repeated, of_the_first)
}


class Mixture(nn.Module):
    """A residual layer of experts."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.loop = loop

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, WIDTH)
        weights, chosen = self.gate(x).softmax(dim=-1).topk(CHOSEN, dim=-1)
        found = self.loop(self.experts, x, weights / weights.sum(-1, keepdim=True), chosen)
        return hidden + found.reshape(hidden.shape)


class Model(nn.Module):
    """Two such layers, and the loss of the next token."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(Mixture(loop), Mixture(loop))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.layers(self.embedding(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    return {name: torch.randint(VOCABULARY, (ROWS, LENGTH)) for name in ("tokens", "labels")}


def check(sizes: Mapping[str, int], names: list[str]) -> None:
    """Compare with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(5)
    for name in names:
        compare_copy(f"{name} on {sizes}", Model(LOOPS[name]), batch(), mesh, opener="layers.1", layouts="search")


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"pipe": 2, "x": 2}, ["by_columns", "if_there_are_any"]),
        ({"z": 2}, ["by_masks", "by_parts", "of_the_first"]),
        ({"data": 2}, ["of_repeated", "by_rows"]),
    ],
    ids=str,
)
def test_loops_over_experts_train_on_any_mesh(sizes: dict[str, int], names: list[str]) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes, names)


@pytest.mark.parametrize("name", LOOPS)
def test_a_warning_says_that_each_expert_computes_all_tokens(name: str, mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Model(LOOPS[name]), mesh, microbatches=2)
    with pytest.warns(AllRowsWarning, match=rf"{EXPERTS} masks select .*test_expert_loops.py"):
        torch.compile(model, backend="fxpar", options=ATEN)(**batch())


def test_two_masks_are_not_warned_of(mesh: fxpar.Mesh) -> None:
    def two(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mask = chosen[:, 0] == 0
        found = x.clone()
        found[mask], found[~mask] = experts[0](x[mask]), experts[1](x[~mask])
        return found

    model = fxpar.distribute(Model(two), mesh, microbatches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AllRowsWarning)
        torch.compile(model, backend="fxpar", options=ATEN)(**batch())
