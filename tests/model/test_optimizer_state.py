"""Optimizers save and load on any mesh: fused and tied weights, groups of parameters, by any of torch's ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.distribute_model import distribute
from fxpar.errors import OptimizerStateError
from fxpar.world.launch import run_ranks
from tests.model.train_with_optimizers import expected, train_from_mesh_to_mesh
from tests.support.fake_mesh import fake_mesh

# torch's Adafactor makes no step where weights are sharded.
PLAN = [({axis: 2}, ["adamw", "sgd"]) for axis in ("x", "z")]
PLAN += [({axis: 2}, ["adamw", "sgd", "adafactor"]) for axis in ("pipe", "data")]


def test_training_goes_on_on_other_meshes_as_in_one_process(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, train_from_mesh_to_mesh, tmp_path, PLAN)):
        for kind, steps, is_plain, state in found:
            whole = expected(kind, steps)
            for name, value in state.items():
                where = f"rank {rank}, {kind}, step {steps}, plain: {is_plain}, {name}"
                torch.testing.assert_close(value, whole[name], rtol=2e-4, atol=2e-5, msg=lambda t, w=where: f"{w}: {t}")


def _trained(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that made a step."""
    optimizer = torch.optim.AdamW(parameters)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_state_dict_has_the_names_of_this_ranks_parameters_and_loads_again() -> None:
    with fake_mesh(pipe=2) as mesh:
        model = distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh, stages=["1"])
        optimizer = _trained(model.named_parameters())
        state = optimizer.state_dict()
        assert set(state["state"]) == {"0.weight", "0.bias"}
        assert state["param_groups"][0]["params"] == ["0.weight", "0.bias"]
        state["param_groups"][0] |= {"lr": 0.5, "params": ["1.weight", "0.weight", "0.bias"]}
        state["state"]["0.bias"]["step"] = torch.tensor(7.0)
        optimizer.load_state_dict(state)
        (group,) = optimizer.param_groups
        assert (group["lr"], group["param_names"]) == (0.5, ["0.weight", "0.bias"])
        assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [1.0, 7.0]


def test_the_states_of_several_models_and_of_other_parameters_are_kept_apart() -> None:
    with fake_mesh(z=2) as mesh:
        models = [distribute(nn.Linear(2, 2), mesh) for _ in range(2)]
        parts = [models[0], nn.Linear(2, 2), models[1]]
        optimizer = _trained([parameter for part in parts for parameter in part.parameters()])
        held = [parameter for part in parts for parameter in part.parameters()]
        for number, parameter in enumerate(held):
            optimizer.state[parameter]["step"] = torch.tensor(float(number))
        state = optimizer.state_dict()
        assert len(state["state"]) == len(held)
        assert list(state["state"])[2:4] == ["parameter 0", "parameter 1"]
        for each in optimizer.state.values():
            each["step"] = torch.tensor(9.0)
        optimizer.load_state_dict(state)
        assert [optimizer.state[parameter]["step"].item() for parameter in held] == [0, 1, 2, 3, 4, 5]


class _Holder(torch.optim.Optimizer):
    """Makes the steps of another optimizer, and has a state dict of its own format."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: None = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {f"{name}.step": state["step"].item() for name, state in self.inner.state_dict()["state"].items()}


def test_an_optimizer_that_holds_another_keeps_its_own_format() -> None:
    with fake_mesh(pipe=2) as mesh:
        model = distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh, stages=["1"])
        holder = _Holder(_trained(model.parameters()))
        holder.step()
        assert holder.state_dict() == {"0.weight.step": 2.0, "0.bias.step": 2.0}


def test_a_whole_state_dict_of_one_process_is_sharded_when_it_is_loaded_or_used() -> None:
    alone = nn.Linear(4, 4)
    numbered = _trained(alone.parameters()).state_dict()
    named = {"state": dict(zip(("weight", "bias"), numbered["state"].values(), strict=True))}
    named["param_groups"] = [{**numbered["param_groups"][0], "params": ["weight", "bias"]}]
    with fake_mesh(x=2) as mesh:
        model = distribute(nn.Linear(4, 4), mesh, layouts={"weight": ("x", None)})
        known, fresh = _trained(model.parameters()), torch.optim.AdamW(model.parameters())
        for optimizer, state in ((known, numbered), (known, named), (fresh, numbered)):
            optimizer.load_state_dict(state)
            if optimizer is fresh:
                _ = fresh.step()  # fxpar first hears of it now
            average = optimizer.state[model.weight]["exp_avg"]
            assert average.placements == model.weight.placements
            assert average.to_local().shape == (2, 4)


def test_other_groups_of_parameters_are_an_error() -> None:
    with fake_mesh() as mesh:
        model = distribute(nn.Linear(2, 2), mesh)
        state = _trained(model.parameters()).state_dict()
        optimizer = _trained([{"params": [model.weight]}, {"params": [model.bias]}])
        with pytest.raises(
            OptimizerStateError, match="it has 1 parameter groups, the optimizer 2; make the optimizer with"
        ):
            optimizer.load_state_dict(state)
        state["param_groups"] = [{"params": ["weight"]}, state["param_groups"][0]]
        with pytest.raises(
            OptimizerStateError, match="parameter group 0 has no parameter of this rank's, and so no lr"
        ):
            optimizer.load_state_dict(state)
