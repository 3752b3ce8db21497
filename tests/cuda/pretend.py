"""Let Inductor generate code for GPUs that are not there, and Triton compile it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.device_interface as interfaces
import torch.utils._triton
import triton
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from triton.backends.compiler import GPUTarget

KINDS = {
    80: SimpleNamespace(name="NVIDIA A100-SXM4-80GB", multi_processor_count=108, shared_memory_per_block_optin=166912),
    90: SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132, shared_memory_per_block_optin=232448),
    100: SimpleNamespace(name="NVIDIA B200", multi_processor_count=148, shared_memory_per_block_optin=232448),
}
"""By compute capability (the tables of the CUDA C++ Programming Guide, and the products' data sheets)."""


def _properties(capability: int) -> SimpleNamespace:
    return SimpleNamespace(
        **vars(KINDS[capability]),
        major=capability // 10,
        minor=capability % 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )


@contextmanager
def without_device_guards() -> Iterator[None]:
    """Inside, fake values of a GPU can be used where PyTorch binds methods by hand, with a guard of their device."""

    def contiguous(self: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        made: Tensor = torch.ops.aten.contiguous(self, memory_format=memory_format)
        return made

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        torch.ops.aten.copy_.default(self, source, non_blocking)
        return self

    def __getitem__(self: Tensor, index: Any) -> Tensor:
        if not (isinstance(index, tuple) and all(isinstance(part, slice) and part.step is None for part in index)):
            return get_item(self, index)
        for dim, part in enumerate(index):
            self = torch.ops.aten.slice(self, dim, part.start, part.stop)
        return self

    get_item = Tensor.__getitem__
    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "__getitem__", __getitem__))
        stack.enter_context(patch.object(Tensor, "__invert__", lambda self: torch.bitwise_not(self)))
        stack.enter_context(patch.object(Tensor, "contiguous", contiguous))
        stack.enter_context(patch.object(Tensor, "copy_", copy_))
        yield


@contextmanager
def pretended_gpus(capability: int = 90, count: int = 2) -> Iterator[list[str]]:
    """Inside, Inductor compiles for GPUs: the list gets the source of every graph, of which nothing is run."""
    properties, sources = _properties(capability), list[str]()

    def keep_source(graph: GraphLowering) -> Any:
        wrapper, _ = graph.codegen()
        sources.append(wrapper.value)
        return SimpleNamespace(call=lambda *_: None, __file__=None, key=None)

    of_cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "device": lambda device=None: nullcontext(),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "memory_allocated": lambda device=None: 0,
        "set_rng_state": lambda state, device="cuda": None,
        "synchronize": lambda device=None: None,
    }
    before = triton.runtime.driver._active
    target = GPUTarget("cuda", capability, 32)
    with ExitStack() as stack:
        for name, pretended in of_cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, pretended))
            if hasattr(interfaces.CudaInterface, name) and name != "device":
                stack.enter_context(patch.object(interfaces.CudaInterface, name, staticmethod(pretended)))
        stack.enter_context(without_device_guards())
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", keep_source))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True, shape_padding=False))
        triton.runtime.driver.set_active(
            SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
        )
        _forget_devices()
        try:
            yield sources
        finally:
            triton.runtime.driver._active = before
            _forget_devices()


def _forget_devices() -> None:
    """What GPUs and what Triton there are, PyTorch asks once."""
    for asked in (DeviceProperties.create, *vars(torch.utils._triton).values()):
        if hasattr(asked, "cache_clear"):
            asked.cache_clear()


def kernels_of(source: str) -> dict[str, str]:
    """The Triton kernels that a graph's code defines, by name."""
    return dict(re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", source, re.DOTALL))


def compile_kernel(name: str, source: str, folder: Path) -> None:
    """Compile every configuration of a kernel, as Inductor does before it is timed; raises what Triton does."""
    path = folder / f"{name}.py"  # Triton reads a kernel's source from its file
    path.write_text(source)
    found = spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    getattr(module, name).precompile(warm_cache_only=True)
