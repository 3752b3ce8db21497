"""Train on one mesh, save with the optimizer's state, and go on on another; what ranks of a test run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

import fxpar

QKV = {"blocks.*.qkv.weight": ("x", None), "blocks.*.qkv.bias": ("x",)}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


class Gated(nn.Module):
    """Three projections in one weight, gating each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(q * k.sigmoid() + v)


class Tied(nn.Module):
    """Two fused blocks between an embedding and a head of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.blocks = nn.Sequential(Gated(), Gated())
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def tied_model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 16, (4, 4), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(1, 1)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, which each have some in both stages, and one whose parameters are in one stage."""
    parameters = dict(model.named_parameters())
    last = [parameters.pop(name) for name in list(parameters) if name.startswith("blocks.1.out")]
    return [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": last, "weight_decay": 0.2},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(step: Callable[..., Tensor], optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        step(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def expected(kind: str, steps: int) -> dict[str, Tensor]:
    """What one process has after so many steps."""
    model = tied_model()
    train(model, OPTIMIZERS[kind](groups(model)), steps)
    return {name: value.detach() for name, value in model.state_dict().items()}


def distributed(sizes: dict[str, int]) -> tuple[nn.Module, Callable[..., Tensor]]:
    mesh = fxpar.init_mesh(**sizes)
    model, stages = tied_model(), ["blocks.1"] if mesh.pipe == 2 else None
    hints = QKV if mesh.x == 2 else {}
    mine = tuple(tensor.chunk(fxpar.num_batch_shards(mesh))[fxpar.batch_rank(mesh)] for tensor in batch())
    fxpar.distribute(model, mesh, stages=stages, layouts=hints, example_inputs=mine)
    compiled = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    return model, lambda *_: compiled(*mine)


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def train_from_mesh_to_mesh(directory: Path, plan: Sequence[tuple[dict[str, int], Sequence[str]]]) -> list[Any]:
    """One step by every kind of optimizer on each mesh in turn, from what was saved on the one before.

    Gives (kind, steps so far, whether the optimizer was loaded by its own method, whole state dict) after each step.
    """
    found, steps = [], dict[str, int]()
    for sizes, kinds in plan:
        model, step = distributed(sizes)
        initial = copy.deepcopy(model.state_dict())
        for kind in kinds:
            for is_plain in (True, False) if kind in steps else (False,):
                optimizer = OPTIMIZERS[kind](groups(model))
                if kind in steps:
                    _load(model, optimizer, directory / f"{kind}-{steps[kind]}", is_plain=is_plain)
                else:
                    model.load_state_dict(initial)
                train(step, optimizer, 1)
                found.append((kind, steps.get(kind, 0) + 1, is_plain, whole(model.state_dict())))
            steps[kind] = steps.get(kind, 0) + 1
            of_model, of_optimizer = get_state_dict(model, optimizer)
            state = {"model": of_model, "optimizer": of_optimizer, "plain": optimizer.state_dict()}
            dcp.save(state, checkpoint_id=directory / f"{kind}-{steps[kind]}")
    return found


def _load(model: nn.Module, optimizer: Optimizer, directory: Path, *, is_plain: bool) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    if is_plain:
        state = {"model": of_model, "plain": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    if is_plain:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["plain"])
    else:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
