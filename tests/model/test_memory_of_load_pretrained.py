"""A rank that loads its share of large weights needs no more memory than the share takes."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

import fxpar
from tests.support.allocated_bytes import peak_allocated_bytes
from tests.support.fake_mesh import fake_mesh

GIGABYTE = 10**9


def write_zeros(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Write bfloat16 zeros that take no space on the disk; returns the size of the file in bytes."""
    sizes = [2 * torch.Size(shape).numel() for shape in shapes.values()]
    ends = list(itertools.accumulate(sizes))
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [end - size, end]}
            for (name, shape), size, end in zip(shapes.items(), sizes, ends, strict=True)
        }
    ).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        return out.truncate(8 + len(header) + ends[-1])


def resident_bytes(peak: bool) -> int:
    """The resident memory of this process with the pages of files that it touched; or the peak since `forget_peak`."""
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def local_bytes(model: nn.Module) -> int:
    """The size of the shards of this rank."""
    held = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    return sum(parameter.to_local().nbytes for parameter in held)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_a_share_of_20_gigabytes_is_loaded_in_the_memory_of_the_share(tmp_path: Path) -> None:
    # A limit of the address space, or of data, would count the file, which safetensors maps into memory as a whole.
    with fake_mesh(x=512) as mesh:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(65536, 163840, bias=False), nn.LayerNorm(163840))
        names = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        assert write_zeros(tmp_path / "model.safetensors", names) > 20 * GIGABYTE
        forget_peak()
        before = resident_bytes(peak=False)
        fxpar.distribute(
            model, mesh, layouts={"0.weight": ("x", None), "1.*": ("x",)}, init_weights=lambda module: None
        )
        fxpar.load_pretrained(model, tmp_path)
        assert local_bytes(model) < 0.1 * GIGABYTE
        assert resident_bytes(peak=True) - before < 0.3 * GIGABYTE
        assert all(not parameter.to_local().any() for parameter in model.parameters())


def small_mixtral() -> Any:
    """Mixtral without values; its experts have most of its parameters."""
    config = transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize(
    "layouts",
    [
        {"*gate_up_proj": ("x", None, None), "*down_proj": ("x", None, None)},
        {"*gate_up_proj": (None, fxpar.Grouped(2, "x"), None), "*down_proj": (None, None, "x")},
        {"*gate_up_proj": (None, None, "x"), "*down_proj": (None, "x", None)},
    ],
    ids=["experts", "Megatron", "transposed"],
)
def test_nothing_is_allocated_beside_the_shards_whichever_dims_are_sharded(layouts: Any, tmp_path: Path) -> None:
    whole = small_mixtral().to_empty(device="cpu")
    whole.save_pretrained(tmp_path)
    with fake_mesh(x=8) as mesh:
        model = small_mixtral()
        fxpar.distribute(model, mesh, layouts=layouts, init_weights=model._init_weights)
        # The allocator counts the file as well, since it is mapped into memory.
        mapped = (tmp_path / "model.safetensors").stat().st_size
        assert peak_allocated_bytes(lambda: fxpar.load_pretrained(model, tmp_path)) < mapped + 1000
