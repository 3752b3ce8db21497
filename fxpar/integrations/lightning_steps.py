"""The steps of a LightningModule as one forward, which fxpar traces."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn

PREFIX = "module."
"""What stands before the LightningModule's own names in those of `LightningSteps`."""


class Logged(NamedTuple):
    """A call of `LightningModule.log`."""

    name: str
    value: Any
    others: tuple[Any, ...]
    named: dict[str, Any]


class LightningSteps(nn.Module):
    """A LightningModule whose forward is one of its steps; it returns what the step returns, and what it logs.

    While a step is traced, `log` of the module notes its arguments, so that tensors among them become results of the
    graph. The caller of the forward logs them.

    hook: the step that the next forward runs, such as "training_step".
    num_indices: how many arguments the step takes after the batch: `batch_idx`, then `dataloader_idx`. They are no
        arguments of the forward, nor in one tuple, since Dynamo would guard them whether or not the step reads them.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.hook = "training_step"
        self.num_indices = self.batch_idx = self.dataloader_idx = 0
        self._noted: list[Logged] | None = None
        log = module.log

        def note_or_log(name: str, value: Any, *others: Any, **named: Any) -> None:
            if self._noted is None:
                log(name, value, *others, **named)
            else:
                self._noted.append(Logged(name, _scalar(value), others, named))

        module.log = note_or_log

    def choose(self, hook: str, *indices: int) -> None:
        """Let the next forward run this step, with these indices."""
        self.hook, self.num_indices = hook, len(indices)
        self.batch_idx, self.dataloader_idx = (*indices, 0, 0)[:2]

    def forward(self, batch: Any) -> tuple[Any, list[Logged]]:
        """The results of the step for this batch, and what it logs."""
        noted: list[Logged] = []
        self._noted = noted
        step = getattr(self.module, self.hook)
        if self.num_indices == 0:
            results = step(batch)
        elif self.num_indices == 1:
            results = step(batch, self.batch_idx)
        else:
            results = step(batch, self.batch_idx, self.dataloader_idx)
        self._noted = None  # the trace must leave no tensor on this object
        return results, noted


def _scalar(value: Any) -> Any:
    """A tensor as a floating-point scalar, of which a distributed step returns the mean over the parts of a batch."""
    if not isinstance(value, Tensor):
        return value
    value = value.reshape(()) if value.dim() > 0 else value
    return value if value.is_floating_point() else value.float()
