"""Move a tensor from one mesh to another, which shares a rank with it, and show who sends what to whom.

    torchrun --nproc-per-node 4 examples/reshard.py --timeline plan.svg

Each two ranks play a host, unless FXPAR_HOST says otherwise: ranks of one host share memory, others use the network.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import fxpar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeline", type=Path, help="draw the plan into this SVG file")
    parser.add_argument("--strategy", default="broadcast", help="or send_recv, local_allgather, global_allgather")
    options = parser.parse_args()

    os.environ.setdefault("FXPAR_HOST", f"host {int(os.environ['RANK']) // 2}")
    dist.init_process_group("gloo")
    left = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    right = DeviceMesh("cpu", [1, 2, 3], mesh_dim_names=("x",))
    whole = torch.arange(7 * 10, dtype=torch.float32).view(7, 10)
    tensor = distribute_tensor(whole, left, [Shard(0)])  # rows 0-3 on rank 0, rows 4-6 on rank 1

    columns = (None, "x")  # a mesh axis for every dim of the tensor
    plan = fxpar.plan_reshard(tensor, right, columns, strategy=options.strategy)
    moved = fxpar.reshard(tensor, right, columns, strategy=options.strategy)

    if right.get_coordinate() is not None:
        here = right.get_local_rank()
        assert torch.equal(moved.to_local(), whole.chunk(3, dim=1)[here])
    if dist.get_rank() == 0:
        print(plan)
        if options.timeline is not None:
            options.timeline.write_text(plan.timeline())
    dist.barrier()
    if dist.get_rank() == 3:
        print(f"rank 3 has columns of shape {tuple(moved.to_local().shape)}, and they are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
