"""Users have the parameter as they use it; its owner has the sum of all gradients, and nobody else any."""

from __future__ import annotations

import pytest
import torch

from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh
from tests.runtime.tie_parameters import NAMES, gradient, owned_layout, share, whole_parameter


def check(sizes: dict[str, int], ranks_per_host: int) -> None:
    mesh = Mesh(**sizes)
    users = sum(gradient(stage) for stage in range(1, mesh.pipe))
    for rank, (received, gradients) in enumerate(run_ranks(mesh.num_ranks, share, sizes, ranks_per_host)):
        at = mesh.coordinate_of(rank)
        if at["pipe"] > 0:
            assert all(torch.equal(received[name], whole_parameter(name)) for name in NAMES)
            assert not gradients
            continue
        assert not received
        assert gradients.keys() == {"used by all", "without gradient at its owner"}
        shape = owned_layout(mesh).local_shape(at)
        assert torch.equal(gradients["used by all"], torch.full(shape, gradient(0) + users))
        assert torch.equal(gradients["without gradient at its owner"], torch.full(shape, users))


@pytest.mark.parametrize("ranks_per_host", [8, 2, 1])
def test_two_borrowers(ranks_per_host: int) -> None:
    check({"pipe": 3}, ranks_per_host)


@pytest.mark.parametrize("ranks_per_host", [8, 2, 1])
def test_users_with_another_layout(ranks_per_host: int) -> None:
    check({"pipe": 3, "x": 2}, ranks_per_host)


def test_batch_shards_return_gradients_of_their_own() -> None:
    check({"pipe": 2, "data": 2}, 2)
