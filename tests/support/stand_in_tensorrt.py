"""Stands in for torch-tensorrt, which needs a GPU: what fxpar uses of its interface, as release 2.13 has it."""

from __future__ import annotations

import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.lowering.tensorrt import engines, requirements

aten = torch.ops.aten

CONVERTED: frozenset[Any] = frozenset(
    (
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.relu.default, aten.gelu.default),
        *(aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sin.default, aten.clone.default),
        *(aten.permute.default, aten.view.default, aten.expand.default, aten.select.int, aten.slice.Tensor),
        *(aten.split.Tensor, aten.native_layer_norm.default, aten._scaled_dot_product_flash_attention_for_cpu.default),
        *(aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default, aten.sub.Tensor),
        *(aten.pow.Tensor_Scalar, aten.mean.default, aten.native_dropout.default, aten.max.dim),
    )
)
"""Ops with a converter in the stand-in. The real one has no CPU attention; it has an embedding, and 200 others."""

DECOMPOSITIONS = torch._decomp.get_decompositions([aten.t, aten.transpose.int, aten.addcmul]) | {
    aten._unsafe_view.default: lambda x, shape: x.view(shape)
}
"""Of those that the real one applies before it looks for converters."""


@dataclass
class StandIn:
    """What was asked of it."""

    converted: frozenset[Any] = CONVERTED
    built: list[fx.Graph] = field(default_factory=list)
    loaded: list[fx.Graph] = field(default_factory=list)
    options: list[Mapping[str, Any]] = field(default_factory=list)
    failure: Exception | None = None

    def __contains__(self, node: fx.Node) -> bool:
        return node.target in self.converted or getattr(node.target, "__name__", "") == "getitem"

    def set_compilation_settings(self, settings: Mapping[str, Any]) -> None:
        assert settings["require_full_compilation"]

    def compile(
        self,
        exported_program: torch.export.ExportedProgram,
        inputs: Sequence[Any] | None = None,
        *,
        arg_inputs: Sequence[Tensor],
        device: torch.device,
        require_full_compilation: bool = False,
        min_block_size: int = 5,
        disable_tf32: bool = False,
        use_fp32_acc: bool = False,
        immutable_weights: bool = True,
        cache_built_engines: bool = False,
        reuse_cached_engines: bool = False,
        custom_engine_cache: BaseEngineCache | None = None,
    ) -> nn.Module:
        """The exported module, whose results are contiguous like those of an engine."""
        self.options.append({name: given for name, given in locals().items() if name not in ("self", "inputs")})
        if self.failure is not None:
            raise self.failure
        assert all(given.is_contiguous() for given in arg_inputs), "torch-tensorrt refuses some other memory orders"
        program = exported_program.run_decompositions(DECOMPOSITIONS)
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        if require_full_compilation and not all(node in self for node in calls):
            raise AssertionError("require_full_compilation=True was specified, but model is not fully supported")
        # The real key has the ops, the types of inputs and the settings, but neither arguments nor edges.
        key = " ".join([*(str(node.target) for node in program.graph.nodes), *(str(each.shape) for each in arg_inputs)])
        cache = None if immutable_weights else custom_engine_cache
        if cache is not None and reuse_cached_engines and (blob := cache.load(key)) is not None:
            loaded = torch.export.load(io.BytesIO(blob))
            self.loaded.append(loaded.graph)
            return _Engine(loaded.module())
        self.built.append(program.graph)
        if cache is not None and cache_built_engines:
            file = io.BytesIO()
            torch.export.save(program, file)
            cache.save(key, file.getvalue())
        return _Engine(program.module())


class _Engine(nn.Module):
    def __init__(self, module: Callable[..., Sequence[Tensor]]) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        assert all(given.is_contiguous() for given in inputs)
        return tuple(each.contiguous() for each in self.module(*inputs))


class BaseEngineCache(ABC):
    """Where engines are kept, by keys."""

    @abstractmethod
    def __init__(self) -> None: ...

    @abstractmethod
    def save(self, hash: str, blob: bytes, *args: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def load(self, hash: str, *args: Any, **kwargs: Any) -> bytes | None: ...


@contextmanager
def stand_in_for_tensorrt() -> Iterator[StandIn]:
    """Within, torch-tensorrt is the stand-in, which "runs" on CPUs."""
    stand_in = StandIn()
    contents: dict[str, dict[str, Any]] = {
        "tensorrt": {"__version__": "11"},
        "torch_tensorrt": {"__version__": "2.13"},
        "torch_tensorrt.dynamo": {"compile": stand_in.compile, "CompilationSettings": dict},
        "torch_tensorrt.dynamo.conversion": {"DYNAMO_CONVERTERS": stand_in},
        "torch_tensorrt.dynamo.lowering": {"get_decompositions": lambda: DECOMPOSITIONS},
        "torch_tensorrt.dynamo._engine_cache": {"BaseEngineCache": BaseEngineCache},
    }
    modules = {name: _module(name, content) for name, content in contents.items()}
    vars(modules["torch_tensorrt"])["dynamo"] = modules["torch_tensorrt.dynamo"]
    with pytest.MonkeyPatch.context() as patched:
        for name, module in modules.items():
            patched.setitem(sys.modules, name, module)
        patched.setattr(requirements, "check_cuda", lambda device_type: None)
        patched.setattr(engines, "_model_of", str)
        yield stand_in


def _module(name: str, content: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    module.__spec__ = ModuleSpec(name, loader=None)
    return module
