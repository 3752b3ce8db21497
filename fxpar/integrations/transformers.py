"""The `Trainer` of transformers for models that `fxpar.distribute` distributed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from fxpar.errors import SumLossWarning
from fxpar.integrations.accelerate import FxparAccelerator
from fxpar.integrations.checkpoints import load_shards, save_shards
from fxpar.integrations.common_lengths import pad_to_common_lengths
from fxpar.model.arguments import count_microbatches, split_dim
from fxpar.model.distribution import Distribution, distribution_of_model
from fxpar.model.pretrained.save import save_pretrained
from fxpar.world.mesh import num_batch_shards

_SHARDS, _SCHEDULER = "shards", "scheduler.pt"
"""In a checkpoint, the folder with the shards of model and optimizer, and the file of the learning rates' schedule."""


class FxparTrainer(Trainer):
    """A `Trainer` whose devices are the batch shards of the mesh; everything else is as its arguments say.

    Give it a distributed model. The batch size per device is that of a batch shard, and of each step all ranks log the
    loss of the global batch. A checkpoint has shards to resume from, on any mesh, and the model as `from_pretrained`
    reads it.

    Args:
        options: those of `torch.compile`.
        others: as those of `transformers.Trainer`.

    Raises:
        PlainModelError: the model was not distributed.
        as FxparAccelerator.
    """

    def __init__(self, *others: Any, options: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._options = options
        super().__init__(*others, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """Let the accelerator follow the mesh."""
        super().create_accelerator_and_postprocess()
        results = {"results": "local"} if self._reads_results else {}
        FxparAccelerator.adopt(self.accelerator, {**results, **(self._options or {})})

    @property
    def _reads_results(self) -> bool:
        """Whether another class may compute a loss of the results of a model, although that returns one, too."""
        others = [cls for cls in type(self).__mro__ if cls not in (FxparTrainer, Trainer)]
        return any("compute_loss" in vars(cls) for cls in others)

    @cached_property
    def _compiled(self) -> nn.Module:
        compiled: nn.Module = self.accelerator.prepare_model(self.model)
        return compiled

    @property
    def _distribution(self) -> Distribution:
        return distribution_of_model(self.model, "FxparTrainer")

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The compiled model, for training and evaluation alike."""
        return self._compiled

    @cached_property
    def _compiled_for_results(self) -> nn.Module:
        compiled: nn.Module = self.accelerator.compile_model(self.model, results="local")
        return compiled

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """The loss, and if more than that is wanted, the results for the rows of this rank's batch shard."""
        compiled = self._compiled if prediction_loss_only else self._compiled_for_results
        found: tuple[Any, Any, Any] = super().prediction_step(compiled, inputs, prediction_loss_only, ignore_keys)
        return found

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Of all batch shards, rather than of all ranks."""
        total: int = self._train_batch_size * args.gradient_accumulation_steps
        return total * num_batch_shards(self._distribution.mesh)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs on the device, with sequences as long as on the other batch shards."""
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        if num_batch_shards(self._distribution.mesh) == 1:
            return prepared
        return pad_to_common_lengths(prepared, self._pad_token)

    @property
    def _pad_token(self) -> int:
        config = getattr(self.model, "config", None)
        for holder in (self.processing_class, getattr(self.data_collator, "tokenizer", None), config):
            if (found := getattr(holder, "pad_token_id", None)) is not None:
                return int(found)
        return 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """The loss of a step, which is the mean over its microbatches.

        A model divides the sum over tokens by the number of those in the batch, so each microbatch is given its share.
        What computes the loss of the model's results, sees the whole batch.
        """
        is_outside = self.label_smoother is not None or self.compute_loss_func is not None
        if num_items_in_batch is None or is_outside:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        dims = split_dim((), inputs, self._distribution.batch_dims)
        microbatches = count_microbatches(tree_leaves(inputs), dims, self._distribution.microbatches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SumLossWarning)
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch / microbatches)
        return (self._as_mean(found[0]), found[1]) if return_outputs else self._as_mean(found)

    def _as_mean(self, loss: Tensor) -> Tensor:
        """The loss, which was multiplied by the number of processes because those of all have the items.

        That is too much for a model that does not divide by the number of items: its loss is a mean already.
        """
        divides = "num_items_in_batch" not in self._distribution.unread_arguments
        if divides or not (self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs):
            return loss
        mean: Tensor = loss / self.accelerator.num_processes
        return mean

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`. All ranks call it.

        A model of transformers is written part by part. Of others, as those of peft, rank 0 gathers the whole.
        """
        if isinstance(self.model, PreTrainedModel):
            folder = Path(output_dir or self.args.output_dir)
            save_pretrained(self.model, folder)
            self._save_beside_weights(folder)
        else:
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside_weights(self, folder: Path) -> None:
        """Save what `Trainer._save` saves beside the model."""
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save shards of model and optimizer, by all ranks, and the scheduler."""
        save_shards(Path(output_dir) / _SHARDS, self.model, [self.optimizer.optimizer])
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the whole model, if there are no shards, which are loaded once there is an optimizer."""
        if not (Path(resume_from_checkpoint) / _SHARDS).exists():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _SHARDS).exists():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_shards(Path(checkpoint) / _SHARDS, self.model, [self.optimizer.optimizer])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))
