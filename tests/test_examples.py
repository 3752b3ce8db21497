"""The examples run, by a launcher or without one, and tell by their exit status whether all went well."""

import json
import math
import subprocess
import sys
from pathlib import Path

from fxpar.world.launch import run_ranks
from tests.support.run_example import EXAMPLES, run_example

SMALL_MODEL = ("--layers", "2", "--hidden", "32", "--microbatches", "2", "--lowering", "aten")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A Python command in `folder`."""
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=250)


def run_on_ranks(num_ranks: int, example: str, *arguments: str, folder: Path) -> list[str]:
    """What each rank prints."""
    return run_ranks(num_ranks, run_example, example, arguments, folder, environment={"WORLD_SIZE": str(num_ranks)})


def test_train_gpt_on_four_processes_has_the_losses_of_one(tmp_path: Path) -> None:
    printed, *others = run_on_ranks(4, "train_gpt.py", *SMALL_MODEL, "--steps", "4", folder=tmp_path)
    report = json.loads((tmp_path / "dump" / "demo.json").read_text())
    keys = {"losses", "reference_losses", "max_loss_diff", "first_loss", "last_loss", "tokens_per_s", "compile_s"}
    assert set(report) == keys
    assert len(report["losses"]) == len(report["reference_losses"]) == 4
    assert abs(report["first_loss"] - math.log(256)) < 0.1, "a fresh model guesses bytes at random"
    assert report["max_loss_diff"] < 1e-4
    assert report["tokens_per_s"] > 0
    assert "4/4" in printed, "there is a progress bar"
    assert not any(others), "one rank speaks for all"


def test_train_gpt_on_one_process_fails_when_the_loss_does_not_fall(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "train_gpt.py"), *SMALL_MODEL, "--steps", "2", "--lr", "1", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "dump" / "demo.json").read_text())
    assert report["last_loss"] > report["first_loss"]
    assert "the loss did not fall" in done.stderr


def test_train_unet_in_four_stages_has_the_losses_of_one_process(tmp_path: Path) -> None:
    small = ("--image", "8", "--channels", "8", "16", "--batch", "8", "--microbatches", "4", "--lowering", "aten")
    run_on_ranks(4, "train_unet.py", *small, "--steps", "4", folder=tmp_path)
    report = json.loads((tmp_path / "dump" / "unet.json").read_text())
    assert report["max_loss_diff"] < 1e-5
    assert report["images_per_s"] > 0


def test_reshard_moves_a_tensor_and_shows_the_plan(tmp_path: Path) -> None:
    done = run(*TORCHRUN, "4", str(EXAMPLES / "reshard.py"), "--timeline", "plan.svg", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broadcast, ordered by best: 6 unit tasks" in done.stdout
    assert "0@0 -> 2@1" in done.stdout, "by the network"
    assert "0@0+1" in done.stdout, "in memory"
    assert "and they are right" in done.stdout
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
