"""The steps of a LightningModule as one forward, which fxpar traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

PREFIX = "module."
"""What stands before the LightningModule's own names in those of `LightningSteps`."""

OF_WHOLE_BATCH = "the whole batch"
"""In place of a process group, says of a logged value that it is that of all batch shards already."""

EARLIER = object()
"""In a trace, the first element of a list whose tensors come from earlier steps."""

_LOG = inspect.signature(LightningModule.log)


class Logged(NamedTuple):
    """A call of `LightningModule.log`."""

    name: str
    value: Any
    others: tuple[Any, ...]
    named: dict[str, Any]

    def by(self, log: Callable[..., None]) -> None:
        """Make the call. A tensor that a step has returned is not reduced over batch shards once more."""
        given = _LOG.bind(None, self.name, self.value, *self.others, **self.named)
        of_whole = {"sync_dist": True, "sync_dist_group": OF_WHOLE_BATCH} if isinstance(self.value, Tensor) else {}
        del given.arguments["self"]
        log(**{**given.arguments, **of_whole})


_made: WeakKeyDictionary[LightningModule, ReferenceType[LightningSteps]] = WeakKeyDictionary()


class LightningSteps(nn.Module):
    """A LightningModule whose forward is one of its steps; it returns what the step returns, logs and appends to lists.

    While a step is traced, `log` of the module notes its arguments, so that tensors among them become results of the
    graph, as do those that the step appends to lists of the module. `run` then logs and appends them.

    hook: the step that the next forward runs, such as "training_step".
    num_indices: how many arguments the step takes after the batch: `batch_idx`, then `dataloader_idx`. They are no
        arguments of the forward, nor in one tuple, since Dynamo would guard them whether or not the step reads them.
    lists: the names of the module's lists that a step may append tensors to.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.hook = "training_step"
        self.num_indices = self.batch_idx = self.dataloader_idx = 0
        self.lists: tuple[str, ...] = ()
        self._noted: list[Logged] | None = None
        log = module.log

        def note_or_log(name: str, value: Any, *others: Any, **named: Any) -> None:
            if self._noted is None:
                log(name, value, *others, **named)
            else:
                self._noted.append(Logged(name, _scalar(value, module.device.type), others, named))

        module.log = note_or_log
        _made[module] = ref(self)  # which lives as long as the module, by what `log` refers to

    @classmethod
    def made_of(cls, module: LightningModule) -> LightningSteps | None:
        """The one that another strategy has made of the module, if any."""
        return found() if (found := _made.get(module)) is not None else None

    def choose(self, hook: str, *indices: int) -> None:
        """Let the next forward run this step, with these indices."""
        self.hook, self.num_indices = hook, len(indices)
        self.batch_idx, self.dataloader_idx = (*indices, 0, 0)[:2]

    def run(self, compiled: Callable[..., Any], batch: Any) -> Any:
        """Call the compiled forward; log and append what the step does, and return what it returns."""
        held = {name: value for name, value in vars(self.module).items() if _may_have_tensors(value)}
        self.lists = tuple(held)
        for name, value in held.items():
            setattr(self.module, name, [EARLIER] if value else [])
        try:
            results, noted, appended = compiled(batch)
        finally:
            for name, value in held.items():
                setattr(self.module, name, value)
        for name, values in appended.items():
            held[name] += values
        for each in noted:
            each.by(self.module.log)
        return results

    def forward(self, batch: Any) -> tuple[Any, list[Logged], dict[str, list[Any]]]:
        """The results of the step for this batch, what it logs, and what it appends to each of the module's lists."""
        noted: list[Logged] = []
        self._noted = noted
        lengths = [len(getattr(self.module, name)) for name in self.lists]
        step = getattr(self.module, self.hook)
        if self.num_indices == 0:
            results = step(batch)
        elif self.num_indices == 1:
            results = step(batch, self.batch_idx)
        else:
            results = step(batch, self.batch_idx, self.dataloader_idx)
        # The trace must leave no tensor on an object.
        self._noted = None
        appended = {}
        for name, length in zip(self.lists, lengths, strict=True):
            grown = getattr(self.module, name)
            appended[name] = grown[length:]
            setattr(self.module, name, grown[:length])
        return results, noted, appended


def _may_have_tensors(value: Any) -> bool:
    """Whether it is a list that is empty, or whose first element has tensors, as those of earlier steps have."""
    return type(value) is list and (not value or any(isinstance(leaf, Tensor) for leaf in tree_leaves(value[0])))


def _scalar(value: Any, device_type: str) -> Any:
    """A tensor as a floating-point scalar, of which a distributed step returns the mean over the parts of a batch.

    So is a floating-point number, which may be that of a tensor.
    """
    if isinstance(value, float):
        return torch.scalar_tensor(value, device=device_type)
    if not isinstance(value, Tensor):
        return value
    value = value.reshape(()) if value.dim() > 0 else value
    return value if value.is_floating_point() else value.float()
