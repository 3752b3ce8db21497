"""The Trainer of transformers, with its arguments unchanged, logs on a mesh what it logs in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from fxpar.world.launch import run_ranks
from tests.support.run_under_launcher import run_under_launcher
from tests.support.train_by_trainer_on_lengths import train
from tests.test_examples import EXAMPLES, TORCHRUN, run

TRAINER = "train_by_trainer.py"
ARGUMENTS = (
    *("--use_cpu", "--max_steps", "6", "--gradient_accumulation_steps", "2", "--max_grad_norm", "0.5"),
    *("--learning_rate", "1e-2", "--lr_scheduler_type", "cosine", "--warmup_steps", "2", "--weight_decay", "0.1"),
    *("--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "3", "--save_steps", "3"),
    *("--report_to", "none", "--disable_tqdm", "true", "--lowering", "aten"),
)
COMPARED = {"step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"}


def batches_of(rows: int) -> Sequence[str]:
    """The arguments for so many rows in a batch of each batch shard."""
    return "--per_device_train_batch_size", str(rows), "--per_device_eval_batch_size", str(2 * rows)


def logged(folder: Path) -> list[dict[str, float]]:
    """What a training in `folder` logged at every step."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{key: entry[key] for key in entry.keys() & COMPARED} for entry in history if "train_runtime" not in entry]


def saved_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What `from_pretrained` reads from a checkpoint, which also has the training's arguments."""
    assert (checkpoint / "training_args.bin").exists()
    return LlamaForCausalLM.from_pretrained(checkpoint).state_dict()


def test_a_trainer_on_a_mesh_logs_saves_and_resumes_as_in_one_process(tmp_path: Path) -> None:
    """Under torchrun on stages and shards of matrices; resumed on stages and batch shards."""
    program = str(EXAMPLES / TRAINER)
    plain = run(program, *ARGUMENTS, *batches_of(4), "--output_dir", "alone", folder=tmp_path)
    assert plain.returncode == 0, plain.stderr
    launched = run(*TORCHRUN, "4", program, *ARGUMENTS, *batches_of(4), "--output_dir", "mesh", folder=tmp_path)
    assert launched.returncode == 0, launched.stderr
    assert "SumLossWarning" not in launched.stderr
    resumed = ("--x", "1", "--z", "2", "--resume_from_checkpoint", "mesh/checkpoint-3", "--output_dir", "resumed")
    run_ranks(4, run_under_launcher, TRAINER, (*ARGUMENTS, *batches_of(2), *resumed), tmp_path)

    expected = logged(tmp_path / "alone")
    assert {key for entry in expected for key in entry} == COMPARED
    assert [entry["step"] for entry in expected] == [1, 2, 3, 3, 4, 5, 6, 6]
    for folder in ("mesh", "resumed"):
        assert logged(tmp_path / folder) == [pytest.approx(entry, abs=1e-4) for entry in expected], folder
    weights = [saved_weights(tmp_path / folder / "checkpoint-6") for folder in ("alone", "resumed")]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-4)


def test_a_trainer_in_bf16_logs_what_it_logs_in_one_process(tmp_path: Path) -> None:
    """The losses are as near as those of sixteen bits can be, and are not those of thirty-two."""
    arguments = (*ARGUMENTS, "--max_steps", "3", "--eval_steps", "3", *batches_of(4))
    run_ranks(1, run_under_launcher, TRAINER, (*arguments, "--bf16", "--output_dir", "alone"), tmp_path)
    run_ranks(1, run_under_launcher, TRAINER, (*arguments, "--output_dir", "precise"), tmp_path)
    run_ranks(4, run_under_launcher, TRAINER, (*arguments, "--bf16", "--output_dir", "mesh"), tmp_path)
    alone, precise, mesh = (
        [entry["loss"] for entry in logged(tmp_path / name) if "loss" in entry] for name in ("alone", "precise", "mesh")
    )
    assert mesh == pytest.approx(alone, rel=1e-3)
    assert alone != pytest.approx(precise, rel=1e-6)
    assert mesh != pytest.approx(precise, rel=1e-6)


def test_batch_shards_are_padded_to_the_longest_of_them(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, train, {}, 4, tmp_path)
    assert [sorted(entry) for entry in alone] == [["grad_norm", "loss"]] * 2 + [["eval_loss"]]
    for logged in run_ranks(2, train, {"z": 2}, 2, tmp_path):
        assert logged == [pytest.approx(entry, abs=1e-4) for entry in alone]
