"""Tied parameters, which several stages use: one stage owns each, and sends it to the others once per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port
from fxpar.resharding.pipeline import Crossing
from fxpar.runtime.edge_transport import EdgeTransport
from fxpar.runtime.gradients import Gradient
from fxpar.transport.local_transport import LocalTransport
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class TiedTransport:
    """The transports of one tied parameter, on a rank of its owner or of another user.

    `layout` is that in which its owner stores it, `dtype` that of its gradients. `value` moves it to all users.
    `gradients` move gradients to the owner: a user has one transport if it has a gradient, and the owner has those of
    all users.
    """

    name: str
    layout: Layout
    dtype: torch.dtype
    is_owner: bool
    value: EdgeTransport | LocalTransport
    gradients: tuple[EdgeTransport | LocalTransport, ...]


class TiedParameters:
    """The tied parameters that this rank owns or uses, in the same order on all ranks."""

    def __init__(self, tied: Sequence[TiedTransport]) -> None:
        self._tied = tied

    @classmethod
    def of(cls, transports: Sequence[tuple[Crossing, EdgeTransport | LocalTransport]], mesh: Mesh) -> TiedParameters:
        """The tied parameters of `transports`, which move parameters and their gradients."""
        pipe = mesh.coordinate["pipe"]
        gradients: defaultdict[Port, list[EdgeTransport | LocalTransport]] = defaultdict(list)
        dtypes: dict[Port, torch.dtype] = {}
        for crossing, transport in transports:
            if crossing.is_gradient:
                gradients[crossing.port].append(transport)
                dtypes[crossing.port] = crossing.dtype
        values = [(crossing, transport) for crossing, transport in transports if not crossing.is_gradient]
        return cls(
            [
                TiedTransport(
                    c.port.name,
                    c.source_layout,
                    dtypes.get(c.port, c.dtype),
                    pipe == c.source_pipe,
                    value,
                    tuple(gradients[c.port]),
                )
                for c, value in values
            ]
        )

    @property
    def names(self) -> set[str]:
        """The names of the parameters."""
        return {each.name for each in self._tied}

    @property
    def without_gradients(self) -> TiedParameters:
        """The same parameters in a step that only runs forwards."""
        return TiedParameters([replace(each, gradients=()) for each in self._tied])

    def settled(self, own: Mapping[str, Gradient], mesh: Mesh) -> list[Gradient]:
        """The gradients that this rank has after `reduce`, if it had `own` before; sorted by name."""
        sent = {each.name for each in self._tied if each.gradients and not each.is_owner}
        received = {
            each.name: Gradient.of(each.name, each.layout, each.dtype, mesh)
            for each in self._tied
            if each.gradients and each.is_owner
        }
        left = {name: gradient for name, gradient in own.items() if name not in sent} | received
        return [left[name] for name in sorted(left)]

    def exchange(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send those of `parameters` that this rank owns to their users; returns the pieces that it receives, by name.

        Raises:
            PeerLostError: another rank died.
        """
        posted = [(each, each.value.post_receive(0)) for each in self._tied if not each.is_owner]
        sent = [(each, each.value.send(parameters[each.name], 0)) for each in self._tied if each.is_owner]
        received = {each.name: each.value.wait(receipt) for each, receipt in posted}
        for each, shipment in sent:
            each.value.complete(shipment)
        return received

    def reduce(self, gradients: dict[str, Tensor]) -> None:
        """Send the users' gradients to the owner, which adds them to its own, in place; no gradient may be partial.

        Raises:
            PeerLostError: another rank died.
        """
        moved = [(each, transport) for each in self._tied for transport in each.gradients]
        posted = [(each.name, transport, transport.post_receive(0)) for each, transport in moved if each.is_owner]
        sent = [(to, to.send(gradients.pop(each.name), 0)) for each, to in moved if not each.is_owner]
        for name, transport, receipt in posted:
            received, own = transport.wait(receipt), gradients.get(name)
            gradients[name] = received if own is None else own + received
        for transport, shipment in sent:
            transport.complete(shipment)

    def finish(self) -> None:
        """Wait until all that this rank forwards to other users is sent.

        Raises:
            PeerLostError: another rank died.
        """
        for each in self._tied:
            for transport in (each.value, *each.gradients):
                transport.finish()
