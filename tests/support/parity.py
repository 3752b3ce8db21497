"""The measure of right: a step on any mesh equals the same step on one process, loss and every gradient."""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import fxpar
from fxpar.bench.models import (
    GPT2_HINTS,
    GPT_HINTS,
    GPT_SEQUENCE_HINTS,
    LLAMA_HINTS,
    LLAMA_SEQUENCE_HINTS,
    example,
)
from fxpar.ir.hints import Entry
from fxpar.ir.overlap_options import Fuse
from fxpar.schedule import SCHEDULE_NAMES
from tests.support.adapters import gpt2_with_adapters, llama_with_adapters
from tests.support.cycled_chain import CycledChain, cycled_batch
from tests.support.frozen_chain import FrozenChain, class_batch
from tests.support.small_models import hf_gpt2, hf_llama, hf_mixtral
from tests.support.uneven_chain import SharedEmbedder, UnevenChain, chain_batch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, Config  # the example's model: it is no package

BATCH, LENGTH, VOCABULARY, IMAGE = 8, 12, 96, 8
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True, slots=True)
class Subject:
    """A model for so many stages, its Megatron hints, what opens these stages, and its arguments for a batch."""

    build: Callable[[int], nn.Module]
    hints: Mapping[str, Sequence[Entry]]
    boundaries: Callable[[int], Sequence[str]]
    make_batch: Callable[[int], dict[str, Tensor]]


def num_layers(num_stages: int) -> int:
    """As few layers as there can be: capturing each takes longer than training it."""
    return max(1, num_stages // 2)


def stage_openers(path: str, num_stages: int) -> list[str]:
    """Cut the layers at `path` before and amid each, so that norms and residuals cross."""
    boundaries = [f"{path}.{half // 2}" + ".mlp" * (half % 2) for half in range(2 * num_layers(num_stages))]
    return boundaries[:: len(boundaries) // num_stages][1:]


def token_batch(arguments: Sequence[str], size: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Random tokens for each of the arguments."""
    return {name: torch.randint(0, VOCABULARY, (size, length)) for name in arguments}


def image_batch(size: int) -> dict[str, Tensor]:
    """Random images and noise."""
    noisy, noise = torch.randn(2, size, 1, IMAGE, IMAGE)
    return {"noisy": noisy, "times": torch.randint(0, 1000, (size,)), "noise": noise}


def small_unet(num_stages: int) -> nn.Module:
    """The example's U-Net with two levels."""
    unet = example("unet")  # not at the top: diffusers takes seconds to import
    model: nn.Module = unet.NoisePredictor(unet.Config(IMAGE, channels=(8, 16), head=4, groups=4))
    return model


# With four stages, each level's skip connections pass others by, and the first downsampled image has two readers.
UNET_OPENERS = {
    1: [],
    2: ["unet.up_blocks.0"],
    4: ["unet.down_blocks.1", "unet.up_blocks.0", "unet.up_blocks.1"],
}


def _frozen_chain(*frozen: str, tied: bool = False) -> Subject:
    boundaries = {1: [], 3: ["layers.1", "layers.2"]}
    return Subject(lambda stages: FrozenChain(frozen, tied=tied), {}, boundaries.__getitem__, class_batch)


def _frozen_llama(*frozen: str) -> Subject:
    def build(num_stages: int) -> nn.Module:
        model = SUBJECTS["llama"].build(num_stages)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    return replace(SUBJECTS["llama"], build=build)


# The second of two stages starts with the layers that are used twice.
CHAIN_OPENERS = {1: [], 2: ["layers.1"]}

SUBJECTS = {
    "gpt": Subject(
        lambda stages: GPT(
            Config(vocabulary=VOCABULARY, context=LENGTH, layers=num_layers(stages), heads=4, hidden=24, tied=True)
        ),
        GPT_HINTS,
        functools.partial(stage_openers, "blocks"),
        functools.partial(token_batch, ("tokens", "targets")),
    ),
    "gpt2": Subject(
        lambda stages: hf_gpt2(layers=num_layers(stages)),
        GPT2_HINTS,
        functools.partial(stage_openers, "transformer.h"),
        functools.partial(token_batch, ("input_ids", "labels")),
    ),
    "llama": Subject(
        lambda stages: hf_llama(layers=num_layers(stages)),
        LLAMA_HINTS,
        functools.partial(stage_openers, "model.layers"),
        functools.partial(token_batch, ("input_ids", "labels")),
    ),
    # The loss of an uneven load is that of a microbatch: of no sum over microbatches.
    "mixtral": Subject(
        lambda stages: hf_mixtral(router_loss=0.5),
        {},
        {1: [], 2: ["model.layers.1"]}.__getitem__,
        functools.partial(token_batch, ("input_ids", "labels")),
    ),
    "chain": Subject(lambda stages: UnevenChain(), {}, CHAIN_OPENERS.__getitem__, chain_batch),
    "shared embedder": Subject(lambda stages: SharedEmbedder(), {}, CHAIN_OPENERS.__getitem__, chain_batch),
    "cycles": Subject(lambda stages: CycledChain(), {}, {1: [], 2: ["head"]}.__getitem__, cycled_batch),
    "unet": Subject(
        small_unet,
        {
            "*.conv1.weight": ("x", None, None, None),
            "*.conv2.weight": (None, "x", None, None),
            "*.to_[qkv].weight": ("x", None),
            "*.to_out.0.weight": (None, "x"),
        },
        UNET_OPENERS.__getitem__,
        image_batch,
    ),
}
FROZEN = {
    "frozen prefix": _frozen_chain("embedding", "layers.0"),
    "frozen middle": _frozen_chain("layers.1"),
    "frozen suffix": _frozen_chain("layers.2", "head"),
    "adapters": _frozen_chain("embedding", "linear", "layers.0", "layers.2", "head"),
    "tied, trained by one user": _frozen_chain("head", tied=True),
}
SUBJECTS |= FROZEN
# On two stages, a frozen first one has no gradient to wait for.
FROZEN_LLAMAS = {
    "llama, embeddings frozen": _frozen_llama("model.embed_tokens"),
    "llama, first stage frozen": _frozen_llama("model.embed_tokens", "self_attn", "layernorm"),
    "llama, head trained alone": _frozen_llama("model."),
}
SUBJECTS |= FROZEN_LLAMAS
SUBJECTS |= {
    "llama with adapters": replace(
        SUBJECTS["llama"],
        build=lambda stages: llama_with_adapters(num_layers(stages)),
        hints={},
        boundaries=functools.partial(stage_openers, "base_model.model.model.layers"),
    ),
    "gpt2 with adapters": replace(
        SUBJECTS["gpt2"],
        build=lambda stages: gpt2_with_adapters(num_layers(stages)),
        hints={},
        boundaries=functools.partial(stage_openers, "base_model.model.transformer.h"),
    ),
}
# Norms and residuals have a part of the sequence on each rank; that of a sequence that does not divide is uneven.
SUBJECTS |= {
    "gpt of two layers": replace(SUBJECTS["gpt"], build=lambda stages: SUBJECTS["gpt"].build(4)),
    "llama of two layers": replace(
        SUBJECTS["llama"],
        build=lambda stages: SUBJECTS["llama"].build(4),
        boundaries=lambda stages: ["model.layers.1"][: stages - 1],
    ),
    "gpt, sequence": replace(SUBJECTS["gpt"], hints=GPT_SEQUENCE_HINTS),
    "gpt, uneven sequence": replace(
        SUBJECTS["gpt"],
        hints=GPT_SEQUENCE_HINTS,
        make_batch=functools.partial(token_batch, ("tokens", "targets"), length=LENGTH - 1),
    ),
    "llama, sequence": replace(SUBJECTS["llama"], hints=LLAMA_SEQUENCE_HINTS),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A distributed training run that must equal the one on a single process: some steps under each schedule.

    `stages` is how many there are, by default one for each pipe rank; `hinted` whether the subject's hints are given;
    `filtered` whether optimizers are given the trainable parameters alone; `profile` and what follows are the options
    of these names.
    """

    subject: str
    mesh: Mapping[str, Any]
    microbatches: int
    lowering: str = "aten"
    schedules: tuple[str, ...] = SCHEDULE_NAMES
    steps: int = 2
    strategy: str = "broadcast"
    stages: int | None = None
    hinted: bool = True
    filtered: bool = False
    profile: bool = False
    gather_weights: str = "auto"
    reduce_gradients: str = "auto"
    remat: str = "none"
    gathered_bytes: float = math.inf
    fuse: Fuse = True


def check_runs_between_hosts(runs: Sequence[Run], ranks_per_host: int) -> None:
    """As `check_runs`, where ranks of different hosts do not use each other's memory. For `run_ranks`."""
    os.environ["FXPAR_HOST"] = f"host {dist.get_rank() // ranks_per_host}"
    check_runs(runs)


def check_runs(runs: Sequence[Run]) -> None:
    """Train every run on this rank and compare with plain training; all have one mesh. For `run_ranks`."""
    mesh = fxpar.init_mesh(**runs[0].mesh)
    for run in runs:
        check_run(run, mesh)


def batch_shard(whole: Mapping[str, Any], mesh: fxpar.Mesh) -> dict[str, Any]:
    """This rank's part of a batch, whose tensors may be nested."""
    shards = fxpar.num_batch_shards(mesh)
    part: dict[str, Any] = tree_map_only(
        torch.Tensor,
        lambda value: value.chunk(shards)[fxpar.batch_rank(mesh)] if value.dim() else value,
        dict(whole),
    )
    return part


def on_device(device_type: str, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch on the current device of this type."""
    return {name: value.to(device_type) for name, value in batch.items()}


def check_run(run: Run, mesh: fxpar.Mesh) -> None:
    """Compare each step's loss, gradients and their norm, with AdamW in between."""
    subject = SUBJECTS[run.subject]
    torch.manual_seed(0)
    num_stages = run.stages or mesh.pipe
    alone = subject.build(num_stages).to(mesh.device_type)
    model = copy.deepcopy(alone)
    turns = [schedule for schedule in run.schedules for _ in range(run.steps)]
    shards = fxpar.num_batch_shards(mesh)
    batches = [on_device(mesh.device_type, subject.make_batch(BATCH * shards)) for _ in turns]
    mine = [batch_shard(batch, mesh) for batch in batches]
    fxpar.distribute(
        model,
        mesh,
        stages=subject.boundaries(num_stages),
        layouts=subject.hints if run.hinted else "search",
        microbatches=run.microbatches,
        schedule=run.schedules[0],
        example_inputs=mine[0],
    )
    names = ("lowering", "strategy", "profile", "gather_weights", "reduce_gradients", "remat", "gathered_bytes", "fuse")
    options = {name: getattr(run, name) for name in names}
    steps = under_schedules(model, run.schedules, options)
    # With the default eps, a gradient that is zero but for rounding moves its weight as far as any other does.
    given = [_trainable(m) if run.filtered else m.parameters() for m in (model, alone)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6) for parameters in given]
    for number, (schedule, whole, part) in enumerate(zip(turns, batches, mine, strict=True)):
        expected, found = loss_of(alone(**whole)), loss_of(steps[schedule](**part))
        expected.backward()
        found.backward()
        compare(f"{run}, step {number} under {schedule}", expected, found, alone, model)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        torch.testing.assert_close(fxpar.clip_grad_norm_(model.parameters(), 1.0), norm, rtol=1e-4, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _trainable(model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters as one group: torch takes an empty group, as some stages have, but no empty list."""
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]


def check_same_bits(subject_name: str, sizes: Mapping[str, Any], microbatches: int) -> None:
    """One batch has the loss and gradients of plain training, the very same under every schedule. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    assert mesh.data == 1, f"every rank is to see the whole batch: {sizes}"
    subject = SUBJECTS[subject_name]
    torch.manual_seed(0)
    alone = subject.build(mesh.pipe).to(mesh.device_type)
    model = copy.deepcopy(alone)
    batch = on_device(mesh.device_type, subject.make_batch(BATCH))
    expected = loss_of(alone(**batch))
    expected.backward()
    stages = subject.boundaries(mesh.pipe)
    fxpar.distribute(model, mesh, stages=stages, layouts=subject.hints, microbatches=microbatches, example_inputs=batch)
    first: dict[str, Tensor] = {}
    for schedule, step in under_schedules(model, SCHEDULE_NAMES, {"lowering": "aten"}).items():
        loss = loss_of(step(**batch))
        loss.backward()
        compare(f"{subject_name} on {sizes} under {schedule}", expected, loss, alone, model)
        gradients = {name: cast(DTensor, p.grad).to_local() for name, p in model.named_parameters()}
        model.zero_grad()
        found = {"the loss": loss.detach(), **gradients}
        first = first or found
        differing = [name for name, value in found.items() if not torch.equal(value, first[name])]
        assert not differing, f"{schedule} returns {differing} other bits than {SCHEDULE_NAMES[0]}"


def under_schedules(
    model: nn.Module, schedules: Sequence[str], options: Mapping[str, Any]
) -> dict[str, Callable[..., Any]]:
    """The distributed model compiled under each schedule, by its name; what `distribute` traced serves them all."""
    return {
        schedule: torch.compile(model, backend="fxpar", options={**options, "schedule": schedule})
        for schedule in schedules
    }


def loss_of(output: Any) -> Tensor:
    """The loss in what a forward returns: all of it, or what is so called."""
    loss: Tensor = output if isinstance(output, torch.Tensor) else output["loss"]
    return loss


def compare(where: str, expected: Tensor, found: Tensor, alone: nn.Module, model: nn.Module) -> None:
    """Compare the loss, and the gradient of every parameter, of a distributed model with those of one process."""
    torch.testing.assert_close(found, expected, rtol=LOSS_TOLERANCE, atol=0, msg=lambda text: f"{where}, loss: {text}")
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}
    # A gradient that is zero but for rounding, such as that of the bias of keys, is held against those around it.
    least = 1e-3 * max(gradient.abs().max() for gradient in wanted.values())
    for name, parameter in model.named_parameters():
        gradient = wanted.get(name)
        if gradient is None:
            assert parameter.grad is None, f"{where}: {name} got a gradient"
            continue
        assert isinstance(parameter.grad, DTensor), f"{where}: {name} got no gradient"
        error = (parameter.grad.full_tensor() - gradient).abs().max() / gradient.abs().max().clamp(min=least)
        assert error <= GRADIENT_TOLERANCE, f"{where}, gradient of {name}: relative error {error:.1e}"


def compare_copy(
    where: str,
    alone: nn.Module,
    whole: Mapping[str, Any],
    mesh: fxpar.Mesh,
    *,
    opener: str,
    layouts: Any = None,
    steps: int = 1,
    model: nn.Module | None = None,
) -> None:
    """Distribute a copy of `alone` in two microbatches, over two stages on a pipeline, and compare its steps.

    Args:
        opener: the path of the module that opens the second stage.
        model: distributed in the place of a copy.
    """
    model, part = model or copy.deepcopy(alone), batch_shard(whole, mesh)
    stages = [opener][: mesh.pipe - 1]
    fxpar.distribute(model, mesh, stages=stages, layouts=layouts, microbatches=2, example_inputs=part)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    for _ in range(steps):
        expected, found = alone(**whole), step(**part)
        expected.backward()
        found.backward()
        compare(where, expected, found, alone, model)
