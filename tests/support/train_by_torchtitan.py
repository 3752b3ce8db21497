"""A training by the Trainer of torchtitan, on CPUs: the parts of its config that need GPUs or files are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as titan_utils

# torchtitan asks this module, as others import it, for the device; without an accelerator it takes CUDA for granted.
titan_utils.device_type = "cpu"
titan_utils.device_module = SimpleNamespace(
    set_device=lambda device: None, current_device=lambda: 0, synchronize=lambda: None, device_count=lambda: 1
)

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import Configurable, DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tests.support.run_under_launcher import set_launcher_environment  # noqa: E402

# It calls `torch.distributed.set_timeout`, which torch 2.13 does not have.
dist_utils.set_pg_timeouts = lambda **unused: None

BATCH, LENGTH, VOCABULARY, STEPS, SAVED_STEP = 8, 16, 64, 4, 2


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        super().__init__()

    def encode(self, *unused: Any, **named: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


class Counting(BaseDataLoader):
    """Rows that count by random strides, dealt out to batch shards in turn; some numbers have no labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **unused: Any
    ) -> None:
        self.first, self.every, self.size, self.read = dp_rank, dp_world_size, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(LENGTH).expand(self.size, LENGTH).contiguous()
        while True:
            rows = self.first + self.every * (self.size * self.read + torch.arange(self.size)[:, None])
            numbers = (rows * 7 + (1 + rows % 5) * torch.arange(LENGTH + 1)) % VOCABULARY
            labels = numbers[:, 1:].masked_fill(torch.arange(LENGTH) < rows % 3, -100)
            self.read += 1
            yield {"input": numbers[:, :-1].contiguous(), "positions": positions.clone()}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.read * self.size * self.every}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["rows"] // (self.size * self.every)


class Recorder(Configurable):
    """Keeps losses and norms in place of the metrics processor, which asks GPUs for their memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        self.color = SimpleNamespace(**dict.fromkeys(("blue", "red", "reset", "green", "yellow"), ""))
        stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: stats)
        self.ntokens_since_last_log, self.data_loading_times = 0, []
        self.logged: list[tuple[float, float]] = []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, max_loss: float, grad_norm: float, extra_metrics: dict[str, Any]) -> None:
        self.logged.append((loss, grad_norm))

    def close(self) -> None:
        pass


def tiny_llama() -> ModelSpec:
    """torchtitan's Llama 3 for debugging, with two layers, whose attention runs on CPUs."""
    spec = model_registry("debugmodel")
    layers = spec.model.layers[:2]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return replace(spec, model=replace(spec.model, layers=layers))


def train(
    folder: Path, prepare: Callable[[ModelSpec], ModelSpec], degrees: dict[str, int], load_step: int = -1
) -> list[tuple[float, float]]:
    """The loss and the norm of gradients of every step; a checkpoint is saved after the second, or loaded."""
    set_launcher_environment()
    shards = degrees.get("data_parallel_shard_degree", 1) * degrees.get("data_parallel_replicate_degree", 1)
    config = Trainer.Config(
        model_spec=prepare(tiny_llama()),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        metrics=Recorder.Config(),
        optimizer=default_adamw(lr=1e-3, fused=False, foreach=True),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH // shards,
            seq_len=LENGTH,
            steps=STEPS,
            max_norm=0.5,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            pipeline_parallel_microbatch_size=BATCH // shards // 2,
            **degrees,
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=SAVED_STEP, last_save_model_only=False, load_step=load_step
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )
    trainer = config.build()
    trainer.train()
    trainer.close()
    return trainer.metrics_processor.logged
