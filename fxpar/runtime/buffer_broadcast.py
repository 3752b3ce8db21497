"""Broadcast the buffers of the first batch shard to all others, after all microbatches of a step have changed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.transport.route_messages import complete
from fxpar.world.mesh import Mesh


class BufferBroadcast:
    """A broadcast that starts when this is made; before it, every batch shard has changed its own copy of the buffers.

    The first shard's are kept, as with DistributedDataParallel: unlike an average, that is also meaningful for
    counters, queues and indices. All buffers are one message, broadcast along one batch axis after the other.

    Args:
        buffers: of this rank, written in place; the same buffers, in the same order, on all ranks of a batch axis.
    """

    def __init__(self, buffers: Sequence[Tensor], mesh: Mesh) -> None:
        self._axes = [axis for axis in mesh.batch_axes if mesh.sizes[axis] > 1] if buffers else []
        self._buffers, self._mesh = buffers, mesh
        if self._axes:
            self._bytes = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
            self._work = self._begin(self._axes[0])

    def finish(self) -> None:
        """Wait for the buffers of the first shard, and write them into this rank's.

        Raises:
            PeerLostError: another rank died.
        """
        for number, axis in enumerate(self._axes):
            if number > 0:
                self._work = self._begin(axis)
            complete(self._work, f"buffers from the first batch shard over axis {axis}")
        if self._axes:
            pieces = self._bytes.split([buffer.nbytes for buffer in self._buffers])
            for buffer, piece in zip(self._buffers, pieces, strict=True):
                # A view as a larger dtype must start at a multiple of its size: the clone does.
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))

    def _begin(self, axis: str) -> dist.Work:
        work: dist.Work | None = dist.broadcast(self._bytes, group=self._mesh.group(axis), group_src=0, async_op=True)
        assert work is not None, "an asynchronous broadcast has a handle"
        return work
