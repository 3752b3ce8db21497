"""The Trainer of Lightning, with FxparStrategy, logs on a mesh what it logs in one process."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.regression import MeanSquaredError

from fxpar.errors import InvalidOptionError, OptimizerStateError, UnavailableTensorError
from fxpar.integrations.lightning import FxparStrategy
from fxpar.world.launch import run_ranks
from tests.support.run_under_launcher import run_under_launcher, set_launcher_environment
from tests.test_examples import EXAMPLES, TORCHRUN, run

EXAMPLE = "train_by_lightning.py"
LOGGED = {"epoch", "step", "train_loss", "train_accuracy", "val_loss", "val_accuracy"}


def logged(folder: Path) -> list[dict[str, float]]:
    """What a training in `folder` logged, by step."""
    with (folder / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """Those of a checkpoint of one process, but for biases of keys: AdamW makes steps of their gradients' rounding."""
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if not name.endswith("qkv.bias")}


def test_lightning_on_a_mesh_logs_saves_and_resumes_as_in_one_process(tmp_path: Path) -> None:
    """Under torchrun on stages and shards of matrices; resumed on stages and batch shards."""
    program = str(EXAMPLES / EXAMPLE)
    plain = run(program, "--out", "alone", folder=tmp_path)
    assert plain.returncode == 0, plain.stderr
    launched = run(*TORCHRUN, "4", program, "--lowering", "aten", "--epochs", "1", "--out", "mesh", folder=tmp_path)
    assert launched.returncode == 0, launched.stderr
    resumed = ("--lowering", "aten", "--x", "1", "--z", "2", "--resume", "mesh/last.ckpt", "--out", "resumed")
    run_ranks(4, run_under_launcher, EXAMPLE, resumed, tmp_path)

    expected = logged(tmp_path / "alone")
    assert {key for row in expected for key in row} == LOGGED
    on_meshes = logged(tmp_path / "mesh") + logged(tmp_path / "resumed")
    assert on_meshes == [pytest.approx(row, abs=1e-4) for row in expected]

    consolidate = "lightning.pytorch.utilities.consolidate_checkpoint"
    done = run("-m", consolidate, "resumed/last.ckpt", "--output_file", "whole.ckpt", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(
        weights(tmp_path / "whole.ckpt"), weights(tmp_path / "alone" / "last.ckpt"), rtol=0, atol=1e-4
    )


class Regression(pl.LightningModule):
    """A linear map with every kind of step; the index of a batch is read by `predict_step` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        (rows,) = batch
        loss = F.mse_loss(self.linear(rows), 2 * rows)
        self.log("average", rows.mean(), on_epoch=True, sync_dist=True)
        return {"loss": loss, "rows": rows}

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: list[Tensor], batch_idx: int) -> None:
        assert torch.equal(outputs["rows"], batch[0]), "results are the rows of this batch shard"

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", F.mse_loss(self.linear(batch[0]), batch[0]))
        self.log("positive", (batch[0] >= 0).all(), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.linear(batch[0]) + batch_idx

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BY_VALUE = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}


def trainer_with(strategy: Any, **others: Any) -> pl.Trainer:
    """A trainer of a few steps that writes nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=2, **quiet, **others)


ROWS = TensorDataset(torch.arange(24.0).reshape(6, 4) / 24)


def batches_of(rows: int, sampler: DistributedSampler | None = None) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(ROWS, batch_size=rows, sampler=sampler)


def run_all(trainer: pl.Trainer, rows: int, sampler: DistributedSampler | None = None) -> tuple[Any, ...]:
    """What is tested and predicted before a training whose gradients are clipped by value, and what after it."""
    module = Regression()
    predicted = torch.cat(trainer.predict(module, batches_of(rows)))
    (tested,) = trainer.test(module, batches_of(rows), verbose=False)
    trainer.fit(module, batches_of(rows, sampler))
    average = trainer.callback_metrics["average"]
    (trained,) = trainer.test(module, batches_of(rows), verbose=False)
    return predicted, tested, average, trained


def run_on_shards() -> tuple[Any, ...]:
    set_launcher_environment()
    strategy = FxparStrategy(z=2, x=2, options={"lowering": "aten"})
    results = run_all(trainer_with(strategy, devices=4, **BY_VALUE), rows=1)
    shard = torch.tensor(strategy.distributed_sampler_kwargs["rank"])
    reduced = [strategy.reduce(shard, reduce_op=name).item() for name in ("sum", "max")]
    decided = [strategy.reduce_boolean_decision(bool(shard), all=every) for every in (True, False)]
    return *results, strategy.all_gather(shard).tolist(), reduced, decided


def test_all_steps_and_collectives_work_on_batch_shards() -> None:
    as_on_shards = DistributedSampler(ROWS, num_replicas=1, rank=0)
    predicted, tested, average, trained = run_all(trainer_with("auto", devices=1, **BY_VALUE), 2, as_on_shards)
    results = run_ranks(4, run_on_shards)
    for rank, (rows, *others) in enumerate(results):
        torch.testing.assert_close(rows, predicted[rank // 2 :: 2])
        assert others[:3] == [pytest.approx(tested), pytest.approx(average), pytest.approx(trained)]
        assert others[3:] == [[0, 1], [1, 1], [False, True]]
    assert trained["error"] != pytest.approx(tested["error"])


class Habitual(pl.LightningModule):
    """Logs numbers, sums and what it gathers, and keeps results in a list for the end of an epoch, as modules do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.outputs: list[dict[str, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[0])
        self.log("number", loss.item(), on_epoch=True)
        self.log("positive", (batch[0] > 0.3).sum(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        gathered = self.all_gather(loss.detach())
        self.trainer.strategy.barrier()
        if self.trainer.is_global_zero and self.local_rank == 0:
            reduced = self.trainer.strategy.reduce(loss.detach(), reduce_op="sum")
            self.log("gathered", gathered.mean() + reduced / self.trainer.world_size, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        found = self.layers(batch[0])
        self.outputs.append({"found": found, "error": (found - batch[0]).abs().mean()})

    def on_validation_epoch_end(self) -> None:
        self.log("largest", torch.cat([each["found"] for each in self.outputs]).max(), reduce_fx="max", sync_dist=True)
        self.log("error", torch.stack([each["error"] for each in self.outputs]).mean(), sync_dist=True)
        self.outputs.clear()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("tested", self.layers(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.3)


def practise(strategy: Callable[[], Any], devices: int, rows: int, folder: Path) -> list[dict[str, float]]:
    """What is logged by a training with averaged weights, a test, the training resumed, and a test of its file."""
    # In the order in which Lightning shuffles for several processes.
    sampler = DistributedSampler(ROWS, num_replicas=1, rank=0) if devices == 1 else None
    data, path = batches_of(rows, sampler), folder / "last.ckpt"

    def train(epochs: int, resumed: Path | None) -> tuple[Habitual, dict[str, float]]:
        module = Habitual()
        trainer = trainer_with(strategy(), devices=devices, callbacks=[EMAWeightAveraging(decay=0.5)])
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, data, batches_of(rows), ckpt_path=resumed)
        trainer.save_checkpoint(path)
        return module, {name: value.item() for name, value in trainer.callback_metrics.items()}

    def test(module: Habitual, file: Path | None) -> dict[str, float]:
        (found,) = trainer_with(strategy(), devices=devices).test(module, batches_of(rows), file, verbose=False)
        return dict(found)

    module, first = train(2, None)
    again = test(module, None)
    _, resumed = train(3, path)
    return [first, again, resumed, test(Habitual(), path)]


def practise_on(sizes: dict[str, int], rows: int, folder: Path) -> list[dict[str, float]]:
    set_launcher_environment()
    return practise(lambda: FxparStrategy(**sizes, options={"lowering": "aten"}), 2, rows, folder)


@pytest.mark.parametrize(("sizes", "rows"), [({"pipe": 2}, 2), ({"z": 2}, 1)], ids=str)
def test_what_modules_log_and_gather_and_callbacks_average_is_that_of_one_process(
    sizes: dict[str, int], rows: int, tmp_path: Path
) -> None:
    expected = practise(lambda: "auto", 1, 2, tmp_path)
    for found in run_ranks(2, practise_on, sizes, rows, tmp_path / "mesh"):
        assert found == [pytest.approx(each, abs=1e-5) for each in expected]
    assert expected[0]["positive"] == (ROWS.tensors[0] > 0.3).sum()


class Unfreezing(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Habitual)
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(pl_module, Habitual)
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer, lr=0.1)


def unfreeze(strategy: Any, devices: int) -> list[float]:
    sampler = DistributedSampler(ROWS, num_replicas=1, rank=0) if devices == 1 else None
    trainer = trainer_with(strategy, devices=devices, callbacks=[Unfreezing()])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Habitual(), batches_of(2, sampler), batches_of(2))
    return [trainer.callback_metrics[name].item() for name in ("number_epoch", "error")]


def unfreeze_on_stages() -> list[float]:
    set_launcher_environment()
    return unfreeze(FxparStrategy(pipe=2, options={"lowering": "aten"}), 2)


def test_a_callback_unfreezes_a_part_of_a_pipeline() -> None:
    expected = unfreeze("auto", 1)
    for found in run_ranks(2, unfreeze_on_stages):
        assert found == pytest.approx(expected, rel=1e-5)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Measured(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanSquaredError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        predicted = self.linear(batch[0])
        self.metric(predicted, batch[0])
        return predicted.sum()


def misuse(file: Path) -> None:
    """Train what cannot be traced, at a precision of Lightning's, and from the file of one process."""
    with pytest.raises(InvalidOptionError, match="option 'precision' is 'bf16-mixed': expected \"32-true\"; give"):
        trainer_with(FxparStrategy(), devices=1, precision="bf16-mixed")
    with pytest.raises(InvalidOptionError, match="option 'automatic_optimization' is False: expected True"):
        trainer_with(FxparStrategy(), devices=1).fit(Manual(), batches_of(2))
    with pytest.raises(
        InvalidOptionError, match="option 'callbacks' is 'StochasticWeightAveraging': expected WeightAv"
    ):
        averaging = StochasticWeightAveraging(swa_lrs=0.1)
        trainer_with(FxparStrategy(), devices=1, callbacks=[averaging]).fit(Regression(), batches_of(2))
    with pytest.raises(UnavailableTensorError, match=r"keeps a tensor on an object at .*in training_step"):
        trainer_with(FxparStrategy(), devices=1).fit(Measured(), batches_of(2))
    with pytest.raises(OptimizerStateError, match=r"is the file of one process.*load its weights"):
        trainer_with(FxparStrategy(), devices=1).fit(Regression(), batches_of(2), ckpt_path=file)
    module = Regression()
    trainer_with(FxparStrategy(), devices=1).test(module, batches_of(2), ckpt_path=file, verbose=False)
    assert torch.equal(module.linear.weight.full_tensor(), torch.full((4, 4), 3.0))


def test_a_strategy_says_what_it_needs(tmp_path: Path) -> None:
    trainer, module = trainer_with("auto", devices=1), Regression()
    trainer.fit(module, batches_of(2))
    nn.init.constant_(module.linear.weight, 3.0)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    run_ranks(1, misuse, tmp_path / "one.ckpt")
