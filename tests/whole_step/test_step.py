"""A step over several ranks: what every rank is handed, checkpoints, and errors that name the difference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import InvalidScheduleError, MemoryBudgetError, PlanMismatchError
from fxpar.resharding.strategies import STRATEGIES
from fxpar.runtime.remote_result import RemoteResult
from fxpar.world.launch import run_ranks
from tests.support.move_tensors import live_on
from tests.support.parity import SUBJECTS, loss_of

ATEN = {"lowering": "aten"}


class Wide(nn.Module):
    """A vocabulary of a size that two ranks do not divide, embedded and predicted; an early and a late result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded = self.embed(tokens)
        logits = self.head(torch.relu(self.middle(embedded)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return embedded, loss, logits


RAGGED = {"embed.weight": ("x", None), "head.weight": ("x", None), "head.bias": ("x",)}


def build_wide(mesh: fxpar.Mesh, microbatches: int = 2) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Wide()
    alone = Wide()
    alone.load_state_dict(model.state_dict())
    shards = fxpar.num_batch_shards(mesh)
    tokens = torch.randint(0, 13, (4 * shards, 5))
    mine = tokens.chunk(shards)[fxpar.batch_rank(mesh)]
    stages = ["middle"] if mesh.pipe == 2 else []
    fxpar.distribute(model, mesh, stages=stages, layouts=RAGGED, microbatches=microbatches, example_inputs=(mine,))
    return model, alone, tokens


def check_results(sizes: dict[str, int], ranks_per_host: int = 8, options: dict[str, Any] = ATEN) -> None:
    """Loss, gradients of ragged shards, and results of the first and the last stage, with and without grad."""
    live_on(dist.get_rank() // ranks_per_host)
    mesh = fxpar.init_mesh(**sizes)
    model, alone, tokens = build_wide(mesh)
    step = torch.compile(model, backend="fxpar", options=options)
    mine = tokens.chunk(fxpar.num_batch_shards(mesh))[fxpar.batch_rank(mesh)]
    expected = alone(tokens)
    with torch.no_grad():
        evaluated = step(mine)
    torch.testing.assert_close(evaluated[1], expected[1])
    embedded, loss, logits = step(mine)
    torch.testing.assert_close(loss, expected[1])
    for found, wanted in ((embedded, expected[0]), (logits, expected[2]), (evaluated[2], expected[2])):
        assert isinstance(found, DTensor)
        assert found.shape == wanted.shape
        assert found.device_mesh.mesh.flatten().tolist()[-1] == dist.get_world_size() - 1
        if mesh.coordinate["pipe"] == mesh.pipe - 1:
            torch.testing.assert_close(found.full_tensor(), wanted.detach())
        else:
            assert isinstance(found, RemoteResult)
    loss.backward()
    expected[1].backward()
    wanted_gradients = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), wanted_gradients[name].grad, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("sizes", [{"pipe": 2, "x": 2}, {"z": 2, "x": 2}, {"pipe": 2, "data": 2}])
def test_results_and_gradients_of_ragged_shards(sizes: dict[str, int]) -> None:
    run_ranks(4, check_results, sizes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_moves_the_same_values_inside_hosts_and_between_them(strategy: str) -> None:
    run_ranks(4, check_results, {"pipe": 2, "x": 2}, 3, {**ATEN, "strategy": strategy})


def global_batch(sizes: dict[str, int]) -> None:
    """A DTensor argument is the global batch: each rank takes its own shard of it."""
    mesh = fxpar.init_mesh(**sizes)
    model, alone, tokens = build_wide(mesh)
    whole = DTensor.from_local(tokens, mesh.stage_mesh, run_check=False)
    loss = torch.compile(model, backend="fxpar", options=ATEN)(whole)[1]
    torch.testing.assert_close(loss, alone(tokens)[1])


def test_a_dtensor_argument_is_global() -> None:
    run_ranks(4, global_batch, {"data": 2, "z": 2})


def different_models() -> str:
    """Rank 1 builds the model for another batch."""
    mesh = fxpar.init_mesh(pipe=2)
    model, _, tokens = build_wide(mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    try:
        step(tokens[: 4 - 2 * mesh.rank])
    except PlanMismatchError as error:
        return str(error)
    return "no error"


def test_ranks_that_derive_different_plans_say_what_differs() -> None:
    for message in run_ranks(2, different_models):
        assert "the captured forward (ranks 1; rank 0 has " in message
        assert "the mesh" not in message


def different_strategies() -> str:
    """Rank 1 would move values otherwise."""
    live_on(dist.get_rank())
    mesh = fxpar.init_mesh(pipe=2, x=2)
    model, _, tokens = build_wide(mesh)
    strategy = "send_recv" if mesh.rank == 1 else "broadcast"
    step = torch.compile(model, backend="fxpar", options={**ATEN, "strategy": strategy})
    try:
        step(tokens)
    except PlanMismatchError as error:
        return str(error)
    return "no error"


def test_ranks_that_would_move_values_differently_say_so_before_any_byte_moves() -> None:
    for message in run_ranks(4, different_strategies):
        assert "these differ from rank 0: the transfers between stages (ranks 1; rank 0 has " in message


def save_and_load(directory: Path, sizes: dict[str, int], others: dict[str, int]) -> list[str]:
    """Save on one layout of the ranks, load into a fresh model on another, and compare what a step then returns."""
    subject = SUBJECTS["gpt"]
    torch.manual_seed(0)
    batch = subject.make_batch(4)
    names, losses = set(), []
    for seed, mesh_sizes in enumerate((sizes, others)):
        mesh = fxpar.init_mesh(**mesh_sizes)
        torch.manual_seed(seed)
        model = subject.build(max(one.get("pipe", 1) for one in (sizes, others)))
        names |= set(model.state_dict())
        stages = subject.boundaries(mesh.pipe)
        fxpar.distribute(model, mesh, stages=stages, layouts=subject.hints, example_inputs=batch)
        if seed == 0:
            dcp.save(model.state_dict(), checkpoint_id=directory)
        else:
            state = model.state_dict()
            dcp.load(state, checkpoint_id=directory)
            model.load_state_dict(state)
        losses.append(loss_of(torch.compile(model, backend="fxpar", options=ATEN)(**batch)).item())
    assert abs(losses[0] - losses[1]) < 1e-5, losses
    assert set(model.state_dict()) <= names
    return sorted(model.state_dict())


def test_distributed_checkpoints_save_and_load_on_another_mesh(tmp_path: Path) -> None:
    held = run_ranks(4, save_and_load, tmp_path, {"z": 2, "x": 2}, {"pipe": 4})
    names = set().union(*held)
    assert names == set(SUBJECTS["gpt"].build(4).state_dict())


def load_single_process_checkpoint(state: dict[str, Any]) -> None:
    """A whole state dict loads; what belongs to other stages is left out."""
    mesh = fxpar.init_mesh(pipe=2, x=2)
    model, alone, tokens = build_wide(mesh)
    alone.load_state_dict(state)
    model.load_state_dict(state)
    found = torch.compile(model, backend="fxpar", options=ATEN)(tokens)[1]
    torch.testing.assert_close(found, alone(tokens)[1])


def test_a_checkpoint_of_one_process_loads() -> None:
    torch.manual_seed(9)
    run_ranks(4, load_single_process_checkpoint, Wide().state_dict())


FOUR = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
ELSEWHERE = [["1F0", "1F1", "1B0", "1B1"], ["0F0", "0F1", "0B0", "0B1"]]


def steps_by(schedules: list[Any], microbatches: int) -> list[tuple[float, list[str]] | str]:
    """Of a step by each schedule: the loss and what was warned of, or the error."""
    mesh = fxpar.init_mesh(pipe=2)
    model, _, tokens = build_wide(mesh, microbatches)
    found: list[tuple[float, list[str]] | str] = []
    for schedule in schedules:
        step = torch.compile(model, backend="fxpar", options={**ATEN, "schedule": schedule})
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                loss = step(tokens)[1].item()
            found.append((loss, [str(warning.message) for warning in warned]))
        except InvalidScheduleError as error:
            found.append(str(error))
    return found


def test_a_step_runs_by_ones_own_schedule_and_refuses_those_for_another_model() -> None:
    for named, own, few, elsewhere in run_ranks(2, steps_by, ["1f1b", FOUR, "0F0 0B0\n1F0 1B0", ELSEWHERE], 2):
        assert own == named
        assert few.startswith("custom: it has actions for 2 stages on 2 pipe ranks, and 1 microbatches: expected")
        assert "pipe ranks (1, 0), but the model was distributed for (0, 1)" in elsewhere


def test_fewer_microbatches_than_stages_work_and_are_warned_of_with_their_bubble() -> None:
    (named,), (other,) = run_ranks(2, steps_by, ["eager-1f1b"], 1)
    assert named[0] == other[0], "all ranks have the loss"
    (text,) = [text for text in named[1] if "bubble" in text]
    assert text.startswith("eager-1f1b: 1 microbatches for 2 pipe ranks: at least 50% of the step is bubble")


def signal() -> tuple[list[str], int]:
    """What a step is warned of by which nothing arrives, and how large its gradients are."""
    live_on(dist.get_rank())
    mesh = fxpar.init_mesh(pipe=2)
    model, _, tokens = build_wide(mesh)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = torch.compile(model, backend="fxpar", options={**ATEN, "strategy": "signal"})
        step(tokens)[1].backward()
    step(tokens)[1].backward()
    return [str(warning.message) for warning in warned], sum(p.grad.numel() for p in model.parameters())


def test_a_step_by_signals_runs_and_says_that_its_results_are_meaningless() -> None:
    for warned, num_gradients in run_ranks(2, signal):
        assert 'with strategy="signal" all results are meaningless; only the times are valid' in warned
        assert num_gradients > 0


def exceed_a_budget() -> str:
    """The error of a rank when another one's stage needs more memory than a rank may take."""
    mesh = fxpar.init_mesh(pipe=2)
    model, _, tokens = build_wide(mesh)
    step = torch.compile(model, backend="fxpar", options={**ATEN, "memory_bytes": 2500})
    try:
        step(tokens)
    except MemoryBudgetError as error:
        return str(error)
    return "it fits"


def test_a_step_that_cannot_fit_is_refused_on_every_rank_before_it_runs() -> None:
    first, last = run_ranks(2, exceed_a_budget)
    assert first == last
    assert first.startswith("rank 1, instruction "), first
    assert "compute 1" in first
