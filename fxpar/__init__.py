"""fxpar: a torch.compile backend that turns a single-device training step into one program per rank."""

from fxpar.distribute import distribute
from fxpar.errors import FxparError
from fxpar.hardware.cluster import Cluster
from fxpar.hardware.network import Network
from fxpar.ir.hints import Grouped
from fxpar.ir.markers import shard
from fxpar.ir.plan import Plan
from fxpar.model.clip import clip_grad_norm_
from fxpar.planner.search import plan
from fxpar.reshard import plan_reshard, reshard
from fxpar.rules import register_rule
from fxpar.world.mesh import Mesh, batch_rank, init_mesh, num_batch_shards

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "FxparError",
    "Grouped",
    "Mesh",
    "Network",
    "Plan",
    "__version__",
    "batch_rank",
    "clip_grad_norm_",
    "distribute",
    "init_mesh",
    "num_batch_shards",
    "plan",
    "plan_reshard",
    "register_rule",
    "reshard",
    "shard",
]
