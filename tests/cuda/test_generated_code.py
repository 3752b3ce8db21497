"""Models go through all passes for GPUs that are not there, up to compiled kernels; each GPU of a host alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

pytest.importorskip("triton")

from fxpar.lowering.inductor import lower_to_inductor
from fxpar.lowering.regions import split_regions
from tests.cuda.attention import KERNELS
from tests.cuda.pretend import compile_kernel, kernels_of, pretended_gpus
from tests.cuda.stages import graphs_on_gpu
from tests.support.parity import image_batch, small_unet, token_batch
from tests.support.small_models import GPT, hf_gpt2, hf_llama, hf_mixtral

SIZES = [{"pipe": 2, "x": 2}, {"z": 2}]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "gpt2 with dropout": (lambda: hf_gpt2(layers=2, dropout=0.1), lambda: token_batch(("input_ids", "labels"), 8)),
    "llama": (lambda: hf_llama(layers=2), lambda: token_batch(("input_ids", "labels"), 8)),
    "mixtral": (hf_mixtral, lambda: token_batch(("input_ids", "labels"), 8)),
    "unet": (lambda: small_unet(2), lambda: image_batch(8)),
}
HALF = "gpt in half precision"
MODELS_IN_HALF = {
    HALF: (lambda: GPT(width=32, heads=4).to(torch.bfloat16), lambda: token_batch(("tokens", "targets"), 8))
}
"""Without masks, which flash attention does not take."""

A100, H100, B200 = 80, 90, 100
"""Compute capabilities. What is generated for them differs in tuning alone, so that one model shows it."""

COMPILED = [
    *((name, sizes, H100) for name in MODELS for sizes in SIZES if (name, sizes) != ("mixtral", SIZES[1])),
    *(("gpt2 with dropout", SIZES[0], capability) for capability in (A100, B200)),
]


def graphs(name: str, sizes: dict[str, int], device: str, attention: str = "efficient") -> Mapping[str, fx.GraphModule]:
    return _graphs(name, SIZES.index(sizes), device, attention)


@functools.cache
def _graphs(name: str, number: int, device: str, attention: str) -> Mapping[str, fx.GraphModule]:
    """Lowering does not change them, so that several tests share those of a model."""
    build, batch = (MODELS | MODELS_IN_HALF)[name]
    torch.manual_seed(0)
    return graphs_on_gpu(build(), batch(), SIZES[number], 2, torch.device(device), KERNELS[attention])


@pytest.mark.parametrize(("name", "sizes", "capability"), COMPILED, ids=str)
def test_every_kernel_compiles(name: str, sizes: dict[str, int], capability: int, tmp_path: Path) -> None:
    modules, kernels = graphs(name, sizes, "cuda:1"), dict[str, tuple[str, str]]()
    with pretended_gpus(capability) as sources:
        for module in modules.values():
            lower_to_inductor(module)
        for source in sources:
            # Names are those of one region's kernels: other regions have others of the same names.
            kernels |= {code.replace(kernel, ""): (kernel, code) for kernel, code in kernels_of(source).items()}
        assert kernels, "there is something to compute"
        for number, (kernel, code) in enumerate(kernels.values()):
            (folder := tmp_path / str(number)).mkdir()
            compile_kernel(kernel, code, folder)


@pytest.mark.parametrize("attention", KERNELS)
def test_every_attention_of_gpus_goes_through_all_passes(attention: str) -> None:
    modules = graphs(HALF, SIZES[0], "cuda:1", attention)
    called = {node.target for module in modules.values() for node in module.graph.nodes}
    assert {KERNELS[attention].forward, KERNELS[attention].backward} <= called
    with pretended_gpus(H100) as sources:
        for module in modules.values():
            lower_to_inductor(module)
    assert sources


def test_every_value_is_on_the_device_masks_of_dropout_too() -> None:
    modules = graphs("gpt2 with dropout", {"pipe": 2, "x": 2}, "cuda:1")
    assert any(torch.ops.fxpar.uniform.default is node.target for m in modules.values() for node in m.graph.nodes)
    for module in modules.values():
        for node in module.graph.nodes:
            for found in pytree.tree_leaves(node.meta.get("val")):
                assert not isinstance(found, Tensor) or found.device == torch.device("cuda:1"), node.format_node()


@pytest.mark.parametrize("name", MODELS)
def test_ranks_with_different_devices_compile_the_same(name: str) -> None:
    first, second = (graphs(name, SIZES[0], device) for device in ("cuda:0", "cuda:1"))
    assert first.keys() == second.keys()
    for stage in first:
        signatures = [[region.signature for region in split_regions(each[stage].graph)] for each in (first, second)]
        assert signatures[0] == signatures[1]
