"""Weights of transformers' models go to a mesh, are trained there, and come back as those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from fxpar.world.launch import run_ranks
from tests.support.pretrained import CONFIGS, batch, load_train_and_save, seeded, train

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.support.pretrained")


def test_trained_weights_are_those_of_one_process_and_stored_as_transformers_does(tmp_path: Path) -> None:
    models = {kind: seeded(kind) for kind in CONFIGS}
    for kind, alone in models.items():
        alone.save_pretrained(tmp_path / "before" / kind)
    run_ranks(4, load_train_and_save, list(CONFIGS), tmp_path)
    for kind, alone in models.items():
        train(alone, alone)
        found, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "after" / kind, output_loading_info=True
        )
        assert not any(report.values()), f"{kind}: {report}"
        with torch.no_grad():
            torch.testing.assert_close(found(**batch(9)).logits, alone(**batch(9)).logits, rtol=0, atol=1e-5)
        assert tensors(tmp_path / "after" / kind).keys() == tensors(tmp_path / "before" / kind).keys(), kind


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that the files of a folder hold."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_under_torchrun_what_is_saved_is_what_was_loaded(tmp_path: Path) -> None:
    seeded("llama").save_pretrained(tmp_path / "before")
    command = [sys.executable, *TORCHRUN, "llama", str(tmp_path / "before"), str(tmp_path / "after")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = tensors(tmp_path / "before"), tensors(tmp_path / "after")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
