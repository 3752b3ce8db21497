"""What a forward calls of `torch.distributed` is traced as on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

import fxpar
from fxpar.errors import CollectiveInForwardWarning
from fxpar.world.launch import RankFailedError, run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard

WIDTH, ROWS = 4, 8


def scaled(h: Tensor) -> Tensor:
    return h * (dist.get_world_size() + dist.get_rank(dist.group.WORLD)) if dist.is_initialized() else h


def more_than_one(h: Tensor) -> Tensor:
    if dist.get_world_size() > 1:
        dist.all_reduce(h)
    return h


def first_alone(h: Tensor) -> Tensor:
    return h + 1 if dist.get_rank() == 0 else h


def averaged(h: Tensor) -> Tensor:
    mean = h.mean()
    dist.all_reduce(mean, dist.ReduceOp.SUM)
    return h / (mean / dist.get_world_size())


def waited_for(h: Tensor) -> Tensor:
    largest = h.detach().amax()
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    return h / largest


def from_first(h: Tensor) -> Tensor:
    mean = h.detach().mean()
    dist.broadcast(mean, 0)
    dist.reduce(mean, 0)
    return h - mean


def gathered(h: Tensor) -> Tensor:
    parts = [torch.empty_like(h) for _ in range(dist.get_world_size())]
    dist.all_gather(tensor_list=parts, tensor=h)
    parts[dist.get_rank()] = h
    return h @ torch.cat(parts).T @ torch.ones(len(h), WIDTH)


def gathered_into(h: Tensor) -> Tensor:
    whole = h.new_empty(dist.get_world_size() * len(h), WIDTH)
    dist.all_gather_into_tensor(output_tensor=whole, input_tensor=h.detach())
    return h * whole.mean()


def scattered(h: Tensor) -> Tensor:
    own, all_own = torch.empty_like(h), torch.empty_like(h)
    dist.scatter(own, scatter_list=[h.detach()], src=0)
    dist.gather(h.detach(), gather_list=[all_own], dst=0)
    return h * own * all_own


def with_gradients(h: Tensor) -> Tensor:
    total = differentiable.all_reduce(h.sum(0)) + differentiable.broadcast(h.mean(0), 0)
    return h / torch.cat(differentiable.all_gather(total[None])).sum(0)


def by_functions(h: Tensor) -> Tensor:
    total = functional.all_reduce(h.sum(0), "sum", dist.group.WORLD)
    return h / functional.wait_tensor(functional.all_gather_tensor(total[None], 0, dist.group.WORLD))


KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        scaled,
        more_than_one,
        first_alone,
        averaged,
        waited_for,
        from_first,
        gathered,
        gathered_into,
        scattered,
        with_gradients,
        by_functions,
    )
}

SILENT = {"scaled", "more_than_one", "first_alone"}
"""Of these nothing would be communicated on one process."""


class Communicating(nn.Module):
    def __init__(self, communicate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.communicate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), communicate

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.communicate(self.first(x).sigmoid())).square().mean()


def inputs() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def losses_alone(parts: int) -> dict[str, tuple[float, Tensor]]:
    """The loss of each kind on one process, and a gradient, as means over parts of the batch."""
    found = {}
    for name, communicate in KINDS.items():
        model = Communicating(communicate)
        of_parts = [model(part) / parts for part in inputs().chunk(parts)]
        torch.stack(of_parts).sum().backward()  # type: ignore[no-untyped-call]
        assert model.first.weight.grad is not None
        found[name] = sum(loss.item() for loss in of_parts), model.first.weight.grad
    return found


def losses_distributed(sizes: Mapping[str, Any]) -> dict[str, tuple[float, Tensor | None, Sequence[str]]]:
    mesh = fxpar.init_mesh(**sizes)
    found = {}
    for name, communicate in KINDS.items():
        model, x = Communicating(communicate), batch_shard({"x": inputs()}, mesh)["x"]
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            fxpar.distribute(model, mesh, stages=["second"] if mesh.pipe > 1 else None, microbatches=2)
            loss = torch.compile(model, backend="fxpar", options=ATEN)(x)
        loss.backward()
        gradient = model.first.weight.grad if hasattr(model.first, "weight") else None
        whole = None if gradient is None else gradient.full_tensor()
        found[name] = loss.item(), whole, [str(w.message) for w in given if w.category is CollectiveInForwardWarning]
    return found


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}, {"pipe": 2}], ids=str)
def test_collectives_of_a_forward_are_those_of_one_process(sizes: Mapping[str, int]) -> None:
    (expected,) = run_ranks(1, losses_alone, 2 * sizes.get("z", 1))
    for found in run_ranks(2, losses_distributed, sizes):
        assert found.keys() == expected.keys()
        for name, (loss, gradient, given) in found.items():
            assert loss == pytest.approx(expected[name][0], rel=1e-5), name
            if gradient is not None:
                torch.testing.assert_close(gradient, expected[name][1], rtol=1e-4, atol=1e-6)
            assert bool(given) == (name not in SILENT), name


def over_a_group(_: int) -> None:
    mesh, group = fxpar.init_mesh(x=2), dist.new_group([0, 1])

    def communicate(h: Tensor) -> Tensor:
        return functional.all_reduce(h, "sum", group)

    fxpar.distribute(Communicating(communicate), mesh, example_inputs=(inputs(),))


def of_a_size_from_before(_: int) -> None:
    mesh = fxpar.init_mesh(x=2)
    size = dist.get_world_size()

    def communicate(h: Tensor) -> Tensor:
        parts = [torch.empty_like(h) for _ in range(size)]
        dist.all_gather(parts, h)
        return parts[0]

    fxpar.distribute(Communicating(communicate), mesh, example_inputs=(inputs(),))


def test_collectives_over_other_groups_are_refused() -> None:
    with pytest.raises(RankFailedError, match=r"all_reduce over a process group of its own\n  at"):
        run_ranks(2, over_a_group, 0)


def test_a_number_of_ranks_from_before_is_refused_where_it_does_not_fit() -> None:
    with pytest.raises(RankFailedError, match=r"must ask for the size when it runs, and not keep one from before"):
        run_ranks(2, of_a_size_from_before, 0)
