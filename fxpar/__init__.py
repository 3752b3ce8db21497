"""fxpar: a torch.compile backend that turns a single-device training step into one program per rank."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpar import environment
from fxpar.garbage_collection import garbage_collection_paused

if TYPE_CHECKING:
    from fxpar.distribute_model import distribute
    from fxpar.errors import FxparError
    from fxpar.explainer.explain import explain
    from fxpar.hardware.cluster import Cluster
    from fxpar.hardware.network import Network
    from fxpar.ir.hints import Grouped
    from fxpar.ir.markers import shard
    from fxpar.ir.plan import Plan
    from fxpar.ir.precision import Precision
    from fxpar.model.add_loss import add_loss
    from fxpar.model.clip import clip_grad_norm_
    from fxpar.model.pretrained.load import load_pretrained
    from fxpar.model.pretrained.save import save_pretrained
    from fxpar.model.whole_state_dict import whole_state_dict
    from fxpar.planner.search import plan
    from fxpar.reshard_tensor import plan_reshard, reshard
    from fxpar.rules import register_rule
    from fxpar.runtime.step_stats import record_steps, step_stats
    from fxpar.world.mesh import Mesh, batch_rank, init_mesh, num_batch_shards

__version__ = "0.1.0"

# CUDA reads the one when it is first used, NCCL the other: most scripts choose a device, or even form the world, before
# they make a mesh.
environment.hardware_queues()
environment.connects_groups_at_once()

__all__ = [
    "Cluster",
    "FxparError",
    "Grouped",
    "Mesh",
    "Network",
    "Plan",
    "Precision",
    "__version__",
    "add_loss",
    "batch_rank",
    "clip_grad_norm_",
    "distribute",
    "explain",
    "init_mesh",
    "load_pretrained",
    "num_batch_shards",
    "plan",
    "plan_reshard",
    "record_steps",
    "register_rule",
    "reshard",
    "save_pretrained",
    "shard",
    "step_stats",
    "whole_state_dict",
]

_MODULES = {
    "Cluster": "hardware.cluster",
    "FxparError": "errors",
    "Grouped": "ir.hints",
    "Mesh": "world.mesh",
    "Network": "hardware.network",
    "Plan": "ir.plan",
    "Precision": "ir.precision",
    "add_loss": "model.add_loss",
    "batch_rank": "world.mesh",
    "clip_grad_norm_": "model.clip",
    "distribute": "distribute_model",
    "explain": "explainer.explain",
    "init_mesh": "world.mesh",
    "load_pretrained": "model.pretrained.load",
    "num_batch_shards": "world.mesh",
    "plan": "planner.search",
    "plan_reshard": "reshard_tensor",
    "record_steps": "runtime.step_stats",
    "register_rule": "rules",
    "reshard": "reshard_tensor",
    "save_pretrained": "model.pretrained.save",
    "shard": "ir.markers",
    "step_stats": "runtime.step_stats",
    "whole_state_dict": "model.whole_state_dict",
}
"""Where each public name is. It is imported when it is first used: PyTorch's compiler and the solvers take seconds."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with garbage_collection_paused():
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
