"""fxpar: a torch.compile backend that turns a single-device training step into one program per rank."""

from fxpar.clip import clip_grad_norm_
from fxpar.distribute import distribute
from fxpar.errors import FxparError
from fxpar.hints import Grouped
from fxpar.markers import shard
from fxpar.mesh import Mesh, batch_rank, init_mesh, num_batch_shards
from fxpar.plan import Plan
from fxpar.planner.cluster import Cluster
from fxpar.planner.search import plan
from fxpar.resharding.network import Network
from fxpar.resharding.tensors import plan_reshard, reshard
from fxpar.rules import register_rule

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
