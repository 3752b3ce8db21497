"""A mesh whose collectives do nothing and take no time, so that only the computation of a step is left."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from fxpar._torch import have_fake_process_groups
from fxpar.world.mesh import Mesh


def silenced(mesh: Mesh) -> Mesh:
    """`mesh` with fake groups: their collectives leave memory unchanged. A collective of all ranks."""
    assert mesh.device_mesh is not None and mesh.device_mesh.mesh_dim_names is not None, (
        "the mesh was made without ranks"
    )
    names = mesh.device_mesh.mesh_dim_names
    backends = (("fake", None),) * len(names)
    have_fake_process_groups()
    ranks = mesh.device_mesh.mesh
    return replace(mesh, device_mesh=DeviceMesh("cpu", ranks, mesh_dim_names=names, backend_override=backends))
