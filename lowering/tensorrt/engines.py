"""Build TensorRT engines by torch-tensorrt, and keep them for later launches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar._torch.compiler import tracing
from fxpar.cache.folder import CacheFolder, own_cache
from fxpar.graph.extract import returned
from fxpar.ir.node_meta import tensor
from fxpar.ir.strides import inverse, stride_order, unfilled_like
from fxpar.lowering.kept_code import describe_graph
from fxpar.lowering.machine_lock import machine_lock, shared_folder
from fxpar.lowering.stitch import Compiled


def engine_settings() -> dict[str, Any]:
    """What torch-tensorrt is asked for: whole graphs, with the precision of PyTorch's own kernels."""
    return {
        "require_full_compilation": True,
        "min_block_size": 1,  # otherwise a graph that its own passes make smaller than that would stay in PyTorch
        "disable_tf32": not torch.backends.cuda.matmul.allow_tf32,
        "use_fp32_acc": True,  # the sums of a float16 matmul
        "immutable_weights": own_cache() is None,  # it keeps engines only if their constants can be exchanged
    }


def build_engine(piece: fx.GraphModule, settings: dict[str, Any]) -> Compiled:
    """An engine that computes `piece`, a graph of converted ops.

    Weights are inputs of the engine like all others: layers share it, and a later training step changes them.

    Raises:
        whatever torch-tensorrt raises where it cannot build the engine.
    """
    import torch_tensorrt

    whole = _Contiguous(piece)
    device = whole.results[0].device
    zeros = [unfilled_like(each).zero_() for each in whole.inputs]
    examples = _in_memory_order(zeros, whole.input_orders)
    # Dynamo, which may be at work on the model, has a fake mode of its own.
    with tracing(None), torch.no_grad(), _kept_engines(piece, device) as kept:
        exported = torch.export.export(whole, examples)
        engine = torch_tensorrt.dynamo.compile(exported, arg_inputs=examples, device=device, **settings, **kept)

    def run(box: list[Tensor]) -> Sequence[Tensor]:
        inputs = _in_memory_order(box, whole.input_orders)
        box.clear()
        found = engine(*inputs)
        return _in_dim_order([found] if isinstance(found, Tensor) else found, whole.result_orders)

    return run


class _Contiguous(nn.Module):
    """Computes a piece on inputs and to results whose dims are in their order in memory.

    Engines take and return contiguous tensors only: so they use transposed weights and images in channels-last order as
    these lie in memory, without a copy.
    """

    def __init__(self, piece: fx.GraphModule) -> None:
        super().__init__()
        self._piece = piece
        self.inputs = [tensor(node) for node in piece.graph.find_nodes(op="placeholder")]
        self.results = [tensor(node) for node in returned(piece)]
        self.input_orders = [stride_order(each) for each in self.inputs]
        self.result_orders = [stride_order(each) for each in self.results]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = self._piece(*_in_dim_order(inputs, self.input_orders))
        return tuple(each.permute(order) for each, order in zip(results, self.result_orders, strict=True))


def _in_memory_order(values: Iterable[Tensor], orders: Iterable[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Contiguous tensors with permuted dims, which are copies only of what has gaps or overlaps in memory."""
    return tuple(each.permute(order).contiguous() for each, order in zip(values, orders, strict=True))


def _in_dim_order(values: Iterable[Tensor], orders: Iterable[tuple[int, ...]]) -> list[Tensor]:
    """What `_in_memory_order` was given."""
    return [each.permute(inverse(order)) for each, order in zip(values, orders, strict=True)]


@contextmanager
def _kept_engines(piece: fx.GraphModule, device: torch.device) -> Iterator[dict[str, Any]]:
    """The arguments by which torch-tensorrt keeps engines in fxpar's cache, which is bounded; none if that is off.

    Within, no other process of this machine builds the same engine: it waits, and finds what this one has kept.
    """
    folder = own_cache()
    if folder is None:
        yield {}
        return
    question = "\n".join(("TensorRT engine", *_versions(device), describe_graph(piece)))
    with machine_lock(shared_folder(), question):
        yield {
            "cache_built_engines": True,
            "reuse_cached_engines": True,
            "custom_engine_cache": _engine_cache(folder, question),
        }


def _versions(device: torch.device) -> tuple[str, ...]:
    """What an engine depends on besides its graph."""
    import tensorrt
    import torch_tensorrt

    return torch_tensorrt.__version__, tensorrt.__version__, _model_of(device)


def _model_of(device: torch.device) -> str:
    """The model of a GPU: an engine has kernels that were chosen on it."""
    return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


def _engine_cache(folder: CacheFolder, question: str) -> Any:
    """The engines that answer `question`, in `folder`.

    The keys of torch-tensorrt alone do not tell apart graphs of the same ops with other arguments or edges. This base
    class is what its documentation derives caches from, though the module's name is private.
    """
    from torch_tensorrt.dynamo._engine_cache import BaseEngineCache

    class EngineCache(BaseEngineCache):
        def __init__(self) -> None:
            """Nothing to prepare; the one of the base class is abstract."""

        def save(self, key: str, blob: bytes, *args: Any, **kwargs: Any) -> None:
            folder.put(f"{question}\n{key}", blob)

        def load(self, key: str, *args: Any, **kwargs: Any) -> bytes | None:
            return folder.get(f"{question}\n{key}")

    return EngineCache()
