"""The Trainer of torchtitan, given a spec of fxpar's, trains a model on a mesh as it does in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.errors import InvalidOptionError
from fxpar.world.launch import run_ranks

pytest.importorskip("torchtitan")

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec

from fxpar.integrations.torchtitan import fxpar_spec, pipeline
from tests.support.train_by_torchtitan import SAVED_STEP, STEPS, tiny_llama, train

PARTIAL = ParallelismConfig(spmd_backend="partial_dtensor")

BY_FXPAR = partial(fxpar_spec, options={"lowering": "aten"})


def by_torchtitan(spec: ModelSpec) -> ModelSpec:
    """The spec for one process, without the wrappers that need GPUs."""
    return replace(spec, parallelize_fn=lambda model, **unused: model)


def test_a_pipeline_of_torchtitan_trains_and_saves_as_in_one_process(tmp_path: Path) -> None:
    """A training on stages and shards of matrices goes on in one process, and on stages and batch shards."""
    on_matrices = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    on_batches = {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}
    logged, *others = run_ranks(4, train, tmp_path, BY_FXPAR, on_matrices)
    assert all(same == logged for same in others)
    assert len(logged) == STEPS and logged[-1][0] < logged[0][0]
    (alone,) = run_ranks(1, train, tmp_path, by_torchtitan, {}, SAVED_STEP)
    # On CPUs, PyTorch's norm of half a million numbers of a matrix is 1e-4 off the norm of the norms of its halves.
    expected = [(pytest.approx(loss, abs=1e-4), pytest.approx(norm, rel=1e-3)) for loss, norm in alone]
    assert logged[SAVED_STEP:] == expected
    for on_rank in run_ranks(4, train, tmp_path, BY_FXPAR, on_batches, SAVED_STEP):
        assert on_rank == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"parallelism": ParallelismConfig()}, "spmd_backend' is 'spmd_types': expected \"partial_dtensor\""),
    "context": ({"parallel_dims": SimpleNamespace(cp=2, ep=1)}, "context_parallel_degree' is 2: expected 1"),
    "expert": ({"parallel_dims": SimpleNamespace(cp=1, ep=4)}, "expert_parallel_degree' is 4: expected 1"),
    "offload": ({"training": TrainingConfig(enable_cpu_offload=True)}, "enable_cpu_offload' is True: expected False"),
    "loss": (
        {"loss_fn": ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()).build()},
        "expected the loss that",
    ),
    "attention": ({"model_config": model_registry("debugmodel").model}, r"layers\.0\.attention\.inner_attention' is"),
    "schedule": (
        {"parallelism": replace(PARTIAL, pipeline_parallel_schedule="ZBVZeroBubble")},
        "expected GPipe, 1F1B or",
    ),
}
"""Parts of a config that fxpar cannot serve, and what their errors say."""


@pytest.mark.parametrize("part", REFUSED)
def test_what_cannot_be_served_is_refused(part: str) -> None:
    given, expected = REFUSED[part]
    fitting: dict[str, Any] = {
        "parallel_dims": SimpleNamespace(cp=1, ep=1, pp=1, dp_replicate=1, dp_shard=1, tp=1),
        "training": TrainingConfig(),
        "parallelism": PARTIAL,
        "loss_fn": CrossEntropyLoss.Config().build(),
        "model_config": tiny_llama().model,
    }
    with pytest.raises(InvalidOptionError, match=expected):
        pipeline(nn.Module(), ac_config=None, device=torch.device("cpu"), **{**fitting, **given})


def test_a_model_without_a_pipeline_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="pipeline_parallel_degree' is 1: expected at least 2"):
        fxpar_spec(tiny_llama()).parallelize_fn(nn.Module(), dump_folder="")
