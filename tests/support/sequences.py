"""Batches of packed, padded and masked sequences, and models whose sizes no axis divides, compared with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fxpar
from tests.support.flex_model import FlexModel, document_mask
from tests.support.parity import batch_shard, compare, loss_of, on_device
from tests.support.small_models import hf_llama

ROWS, LENGTH, VOCABULARY, ODD_VOCABULARY = 4, 12, 96, 97


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and a batch for each step.

    batches: each makes a batch of so many rows.
    change: makes of a copy of the model the one that is distributed.
    added: arguments for the distributed model alone, from those of its batch shard.
    layers: the path of the layers, each of which may be a stage.
    rows: of a batch shard.
    """

    build: Callable[[], nn.Module]
    batches: Sequence[Callable[[int], Mapping[str, Tensor]]]
    change: Callable[[Any], None] = lambda model: None
    added: Callable[[Mapping[str, Tensor]], Mapping[str, Any]] = lambda batch: {}
    layers: str = "model.layers"
    rows: int = ROWS
    microbatches: int = 2
    lowering: str = "aten"


def check_sequences(sizes: Mapping[str, Any], names: Sequence[str]) -> None:
    """Compare the loss and all gradients of each step of these cases, and an evaluation. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for name in names:
        _check(name, CASES[name], mesh)


def _check(name: str, case: Case, mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone = case.build().to(mesh.device_type)
    model = copy.deepcopy(alone)
    case.change(model)
    shards = fxpar.num_batch_shards(mesh)
    batches = [on_device(mesh.device_type, make(case.rows * shards)) for make in case.batches]
    mine = [batch_shard(batch, mesh) for batch in batches]
    given = [{**part, **case.added(part)} for part in mine]
    stages = [f"{case.layers}.1"][: mesh.pipe - 1]
    fxpar.distribute(model, mesh, stages=stages, microbatches=case.microbatches, example_inputs=given[0])
    step = torch.compile(model, backend="fxpar", options={"lowering": case.lowering})
    for number, (whole, part) in enumerate(zip(batches, given, strict=True)):
        expected, found = loss_of(alone(**whole)), loss_of(step(**part))
        expected.backward()
        found.backward()
        compare(f"{name} on {mesh}, step {number}", expected, found, alone, model)
        alone.zero_grad()
        model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(step(**part)), expected.detach(), rtol=1e-5, atol=0)


def tokens(rows: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    return {name: torch.randint(0, vocabulary, (rows, length)) for name in ("input_ids", "labels")}


def documents(rows: int, length: int) -> Tensor:
    """The number of each token's document, of three that each row has."""
    ends = torch.stack([1 + torch.randperm(length - 1)[:2] for _ in range(rows)])
    return (torch.arange(length) >= ends[:, :, None]).sum(1)


def packed(rows: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Positions start at zero in every document, from which transformers derives its masks."""
    numbers, places = documents(rows, length), torch.arange(length).expand(rows, -1)
    starts = torch.where(numbers.diff(prepend=numbers[:, :1]) > 0, places, 0).cummax(1).values
    return {**tokens(rows, length, vocabulary), "position_ids": places - starts}


def flattened(rows: int) -> dict[str, Tensor]:
    """As transformers' collator makes rows, each of three documents without padding."""
    collate = transformers.DataCollatorWithFlattening()
    lengths = [[3, 4, 5], [6, 1, 5]]
    made = [collate([{"input_ids": tokens(1, n)["input_ids"][0].tolist()} for n in row]) for row in lengths[:rows]]
    return {name: torch.cat([row[name] for row in made]) for name in made[0]}


def padded(rows: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Rows of different lengths, padded at the right and at the left in turn; all have as many labels."""
    lengths = torch.randint(length // 2, length + 1, (rows, 1))
    places = torch.arange(length).expand(rows, -1)
    mask = torch.where(torch.arange(rows)[:, None] % 2 == 0, places < lengths, places >= length - lengths)
    batch = tokens(rows, length)
    count = mask.cumsum(1)  # the first token of a row is never predicted
    labels = batch["labels"].masked_fill(~mask | (count == 1) | (count > length // 2), -100)
    return {**batch, "attention_mask": mask.long(), "labels": labels}


def masked(rows: int, dtype: torch.dtype = torch.bool) -> dict[str, Tensor]:
    """Each row has a mask of its own for all pairs of tokens."""
    mask = torch.rand(rows, 1, LENGTH, LENGTH).lt(0.5).tril() | torch.eye(LENGTH, dtype=torch.bool)
    if dtype is not torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return {**tokens(rows), "attention_mask": mask}


def numbered(rows: int, length: int) -> dict[str, Tensor]:
    """The arguments of `FlexModel`."""
    batch = tokens(rows, length, ODD_VOCABULARY)
    return {"tokens": batch["input_ids"], "targets": batch["labels"], "documents": documents(rows, length)}


def sizes_of(config: type[Any], **others: Any) -> Any:
    """A configuration of two layers that names no special tokens."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return config(num_hidden_layers=2, use_cache=False, **special, **others)


def qwen_of_odd_sizes() -> nn.Module:
    """Three heads, a vocabulary and an MLP that two ranks cannot halve."""
    config = sizes_of(
        transformers.Qwen2Config,
        vocab_size=ODD_VOCABULARY,
        hidden_size=30,
        intermediate_size=35,
        num_attention_heads=3,
        num_key_value_heads=3,
    )
    return transformers.Qwen2ForCausalLM(config)


def gemma() -> nn.Module:
    """Gemma 2, whose scores are capped, and whose first layer attends to a window."""
    config = sizes_of(
        transformers.Gemma2Config,
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        query_pre_attn_scalar=6,
        sliding_window=4,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config)


def by_flex_attention(model: Any) -> None:
    model.set_attn_implementation("flex_attention")


def by_checkpointed_flex_attention(model: Any) -> None:
    by_flex_attention(model)
    model.gradient_checkpointing_enable()
    model.train()


def eagerly(model: Any) -> None:
    model.set_attn_implementation("eager")


def without_whole_masks(model: FlexModel) -> None:
    model.dense = False


def bounds(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the collator adds for kernels that take the documents' bounds."""
    (starts,) = torch.where(batch["position_ids"][0] == 0)
    ends = torch.cat([starts, torch.tensor([LENGTH])]).int()
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def given_mask(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"block_mask": document_mask(batch["documents"])}


flex_model = partial(FlexModel, dense=True)
flex_case = partial(Case, change=without_whole_masks, layers="layers")
odd_llama = partial(hf_llama, vocabulary=ODD_VOCABULARY, width=36, heads=6)
odd_packed = partial(packed, length=11, vocabulary=ODD_VOCABULARY)

CASES = {
    "packed, of several lengths": Case(hf_llama, [packed, partial(packed, length=9), packed]),
    "packed, eager attention": Case(hf_llama, [packed], eagerly),
    "padded": Case(hf_llama, [padded]),
    "masks": Case(hf_llama, [masked, partial(masked, dtype=torch.float32)]),
    "flattened": Case(hf_llama, [flattened], added=bounds, rows=1, microbatches=1),
    "odd sizes": Case(qwen_of_odd_sizes, [odd_packed]),
    "odd sizes, grouped queries": Case(partial(odd_llama, kv_heads=3), [odd_packed]),
    "odd sizes, one head of keys": Case(partial(odd_llama, kv_heads=1), [odd_packed]),
    "flex, packed": Case(hf_llama, [packed, partial(packed, length=9)], by_flex_attention),
    "flex, added masks": Case(hf_llama, [partial(masked, dtype=torch.float32)], by_flex_attention),
    "flex, padded": Case(hf_llama, [padded], by_flex_attention),
    "flex, checkpointed": Case(gemma, [packed], by_checkpointed_flex_attention),
    "flex, odd sizes": Case(qwen_of_odd_sizes, [odd_packed], by_flex_attention),
    "flex": flex_case(flex_model, [partial(numbered, length=11)]),
    "flex, given mask": flex_case(flex_model, [partial(numbered, length=12)] * 2, added=given_mask, microbatches=1),
    "flex, odd heads": flex_case(partial(flex_model, heads=3, kv_heads=3), [partial(numbered, length=11)]),
    "flex, inductor": flex_case(flex_model, [partial(numbered, length=12)], lowering="inductor"),
}
