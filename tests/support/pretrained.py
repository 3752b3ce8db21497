"""Small models of transformers whose weights go from files to ranks and back; what ranks of tests run, and torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import fxpar
from fxpar.errors import FxparError

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
}
MESH, STEPS = {"pipe": 2, "x": 2}, 3


def seeded(kind: str) -> nn.Module:
    """The model, randomly initialised."""
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    return model


def batch(number: int) -> dict[str, Tensor]:
    """The arguments of a step."""
    tokens = torch.randint(96, (8, 12), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


def train(step: Any, model: nn.Module) -> None:
    """Some steps; `step` is the model, or what it was compiled to."""
    # With the default eps, a gradient that is zero but for rounding moves its weight as far as any other does.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for number in range(STEPS):
        step(**batch(number))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def load_train_and_save(kinds: Sequence[str], folder: Path) -> None:
    """Load each of the models from `folder / "before" / kind`, train it on a mesh, and save it in `"after"`."""
    mesh = fxpar.init_mesh(**MESH)
    for kind in kinds:
        model = loaded(kind, mesh, folder / "before" / kind)
        train(torch.compile(model, backend="fxpar", options={"lowering": "aten"}), model)
        fxpar.save_pretrained(model, folder / "after" / kind, max_shard_size="20KB")


def loaded(kind: str, mesh: fxpar.Mesh, folder: Path) -> Any:
    """The model, built without memory, distributed, and loaded."""
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=batch(0), init_weights=model._init_weights)
    fxpar.load_pretrained(model, folder)
    return model


class Two(nn.Module):
    """Two layers, which are two stages on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean()


def two_on_two_ranks() -> nn.Module:
    torch.manual_seed(0)
    return fxpar.distribute(Two(), fxpar.init_mesh(pipe=2), stages=["second"])


def load_where_one_rank_has_no_folder(folder: Path) -> str:
    """The error of this rank; rank 1 looks into a folder that is not there."""
    model = two_on_two_ranks()
    return error_of(fxpar.load_pretrained, model, folder / ("absent" if dist.get_rank() == 1 else ""))


def save_where_one_rank_cannot_write(folder: Path) -> tuple[str, str]:
    """The errors of this rank of two saves: first all is well, then rank 1 cannot write its file."""
    model = two_on_two_ranks()
    first = error_of(fxpar.save_pretrained, model, folder)
    if dist.get_rank() == 1:
        safetensors.torch.save_file = _full_disk
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return first, error_of(fxpar.save_pretrained, model, folder)


def _full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def error_of(call: Any, *args: Any) -> str:
    """The class and message of what `call` raises; nothing if it returns."""
    try:
        call(*args)
    except (FxparError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(kind: str, source: str, target: str) -> None:
    """Load and save on two stages: the program of a launcher."""
    mesh = fxpar.init_mesh(pipe=2)
    fxpar.save_pretrained(loaded(kind, mesh, Path(source)), target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
