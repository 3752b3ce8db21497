"""Models from the meta device: initialised by their modules, by `init_weights`, or loaded, and nothing runs before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.distribute_model import distribute
from fxpar.errors import NotCompiledError, NotLoadedError, UninitializedModuleError
from fxpar.model.unset import place_buffers
from tests.support.fake_mesh import as_rank, fake_mesh

ROWS = torch.zeros(2, 4)


class Scale(nn.Module):
    """Does not initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.table


class Tied(nn.Module):
    """Its head has the first layer's weight, and a bias of its own; between them are running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.norm, self.head = nn.Linear(4, 4), Scale(), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.scale(self.first(x)))).mean()


class Rotary(nn.Module):
    """Keeps a table that it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.angles).mean()


def on_meta(cls: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return cls()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_initialise_itself_is_left_empty_until_it_is_loaded(rank: int) -> None:
    state = Tied().state_dict()
    with fake_mesh(pipe=2) as mesh:
        model = distribute(on_meta(Tied), as_rank(mesh, rank), stages=["scale"], example_inputs=(ROWS,))
        # The table is read only, so every rank has it.
        missing = "scale.table" if rank == 0 else "scale.weight, scale.table"
        with pytest.raises(NotLoadedError, match=f"no values yet for {missing}; call load_state_dict or fxpar"):
            model(ROWS)
        model.load_state_dict(state)
        with pytest.raises(NotCompiledError):  # all is loaded
            model(ROWS)


def test_what_is_written_in_place_is_loaded() -> None:
    with fake_mesh() as mesh:
        model = distribute(on_meta(Scale), mesh)
        for tensor in model.state_dict().values():  # as torch.distributed.checkpoint.load does
            tensor.detach().copy_(torch.zeros(4)) if not hasattr(tensor, "to_local") else tensor.to_local().fill_(0)
        with pytest.raises(NotCompiledError):
            model(ROWS)


def test_a_bias_is_initialised_alike_wherever_the_weight_beside_it_is() -> None:
    found = []
    for sizes, rank in (({}, 0), ({"pipe": 2}, 1)):
        with fake_mesh(**sizes) as mesh:
            torch.manual_seed(5)
            stages = ["scale"] if sizes else None
            model = distribute(on_meta(Tied), as_rank(mesh, rank), stages=stages, example_inputs=(ROWS,))
            found.append(model.head.bias.to_local().detach())
            assert "weight" in model.head._parameters or sizes, "the stand-in is gone"
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_buffer_that_no_checkpoint_has_must_be_computed() -> None:
    with fake_mesh() as mesh:
        with pytest.raises(
            UninitializedModuleError, match=r"the buffers angles, which no checkpoint has.*init_weights="
        ):
            distribute(on_meta(Rotary), mesh, example_inputs=(ROWS,))
        model = distribute(on_meta(Rotary), mesh, init_weights=lambda module: module.angles.fill_(2))
        assert model.angles.tolist() == [2.0] * 4


def test_what_init_weights_passes_over_must_be_loaded() -> None:
    with fake_mesh() as mesh:
        model = distribute(on_meta(Scale), mesh, init_weights=lambda module: nn.init.ones_(module.weight))
        assert model.weight.to_local().tolist() == [1.0] * 4
        with pytest.raises(NotLoadedError, match="no values yet for table;"):
            model(ROWS)


def test_buffers_that_lie_elsewhere_come_to_the_devices_of_the_mesh() -> None:
    model = nn.Sequential(Scale(), nn.BatchNorm1d(4), Scale())
    model[2].table = model[0].table
    assert place_buffers(model, "cpu") == {}
    before = dict(model.named_buffers())
    assert all(buffer is before[name] for name, buffer in model.named_buffers()), "those that are there stay"
    place_buffers(model, "meta")  # which stands for another device here
    assert all(buffer.is_meta for buffer in model.buffers())
    assert model[2].table is model[0].table
