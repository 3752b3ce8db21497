"""Models that read numbers from tensors; pytest rewrites the assertions of test modules, which Dynamo then traces."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Reading(nn.Module):
    """Computes with numbers that `read` makes of the first layer's results and of lengths."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(4, 4), nn.Linear(4, 4), read

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.second(self.read(self.first(x), lengths)).square().mean()


def asserts_an_integer(h: Tensor, lengths: Tensor) -> Tensor:
    assert lengths.max().item() <= h.shape[1]
    return h


def asserts_a_truth(h: Tensor, lengths: Tensor) -> Tensor:
    assert torch.all(lengths >= 1).item(), "empty sequences"
    return h


def asserts_two_numbers(h: Tensor, lengths: Tensor) -> Tensor:
    assert lengths.min().item() <= lengths.sum().item()
    return h


def checks(h: Tensor, lengths: Tensor) -> Tensor:
    torch._check(lengths.max().item() <= 4)
    return h


def scales(h: Tensor, lengths: Tensor) -> Tensor:
    return h * lengths.max().item()


def scales_by_its_maximum(h: Tensor, lengths: Tensor) -> Tensor:
    return h / h.abs().max().item()


def scales_by_a_quotient(h: Tensor, lengths: Tensor) -> Tensor:
    return h * (lengths.max().item() / 3)


def scales_integers(h: Tensor, lengths: Tensor) -> Tensor:
    return h + (lengths * h.max().item()).unsqueeze(1)


def scales_by_a_bounded_number(h: Tensor, lengths: Tensor) -> Tensor:
    return h / max(lengths.min().item(), 2) + min(3.5, h.detach().sum().item())


def makes_tensors(h: Tensor, lengths: Tensor) -> Tensor:
    largest, total = lengths.max().item(), h.detach().sum().item()
    mixed = torch.tensor([largest, total, 2])
    full = torch.full((4,), total) + torch.full_like(h, largest) + h.new_full((4,), total)
    return h * mixed.sum() + full * torch.tensor(largest) * torch.empty_like(h).fill_(total)


def calls_with_numbers(h: Tensor, lengths: Tensor) -> Tensor:
    largest, total = lengths.max().item(), h.detach().sum().item()
    h = h.masked_fill(h > total, total).clamp(max=largest) + torch.where(h > 0, total, h.clamp(-0.5, largest))
    return torch.mul(h.add(total).sub_(largest), total).pow(largest)


def rounds(h: Tensor, lengths: Tensor) -> Tensor:
    number = h.detach().abs().sum().item()
    near = round(number) + math.floor(number) + 2 * math.ceil(number) + int(number + 0.5)
    return h * near * round(number, 1) * math.sqrt(number)


def as_parts(h: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([part * 2 for part in h.flatten().split((2 * lengths).tolist())]).view_as(h)


READS = [
    asserts_an_integer,
    asserts_a_truth,
    asserts_two_numbers,
    checks,
    scales,
    scales_by_its_maximum,
    scales_by_a_quotient,
    scales_integers,
    scales_by_a_bounded_number,
    makes_tensors,
    calls_with_numbers,
    rounds,
    as_parts,
]


def as_a_size(h: Tensor, lengths: Tensor) -> Tensor:
    return h + torch.ones(lengths.max().item()).sum()


READS_OF_SHAPES = [as_a_size]


class Checked(nn.Module):
    """Balanced over two stages, one of them has the assertion alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.max().item() <= x.shape[1]
        return self.second(self.first(x)).square().mean()
