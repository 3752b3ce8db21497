"""The messages of one route over the network: tags, sends, receives, and waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.world.lost_peers import naming_lost_peers

TAG_KINDS = 5
"""Tags per microbatch: for sends, for forwarded chunks, for the answers to each of these, and for the send order."""

ANSWER = torch.zeros(1, dtype=torch.uint8, device="cpu")
"""What a rank sends back when it has received all of a relay, or so much that the next relay may be sent."""


def complete(work: dist.Work, name: str, peer: int | None = None, timeout: timedelta | None = None) -> None:
    """Wait for `work`, which moves `name` from or to `peer`, or is a collective.

    Raises:
        PeerLostError: a rank that takes part has died, or took longer than `timeout`.
    """
    try:
        with naming_lost_peers(name, peer):
            work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        raise PeerLostError(name, peer, str(error)) from error


@dataclass(slots=True)
class Shipment:
    """The handle of a send that has begun; it keeps alive what is being sent.

    `acknowledged` are receives of the answers that peers send when they have everything. They are needed because, when
    a peer dies, gloo's receives fail at once, but its sends do not. `order` are receives of the answers, by relay, that
    the next relay may be sent. `shipped` is done when a thread has begun all sends.
    """

    acknowledged: deque[tuple[dist.Work, int, Tensor]] = field(default_factory=deque)
    order: dict[int, tuple[dist.Work, int, Tensor]] = field(default_factory=dict)
    works: deque[tuple[dist.Work, int, Tensor]] = field(default_factory=deque)
    shipped: Future[None] | None = None


@dataclass(frozen=True, slots=True)
class RouteMessages:
    """The messages of the route of value `name`; its tags begin at `tag`, with `num_tags` of each kind."""

    name: str
    tag: int
    num_tags: int
    timeout: timedelta

    def tag_of(self, microbatch: int, *, passed_on: bool) -> int:
        """The tag of messages; the tag of their answers is greater by `num_tags`.

        A rank forwards chunks concurrently with its own sends, in no fixed order: so these have different tags.
        """
        return self.tag + 2 * passed_on * self.num_tags + microbatch % self.num_tags

    def order_tag(self, microbatch: int) -> int:
        """The tag of the answer that the next relay may be sent."""
        return self.tag + 4 * self.num_tags + microbatch % self.num_tags

    def send(self, shipment: Shipment, chunk: Tensor, peer: int, tag: int) -> None:
        """Begin to send `chunk` as part of `shipment`.

        Raises:
            PeerLostError: `peer` has died.
        """
        shipment.works.append((self._begin(dist.isend, chunk, peer, tag), peer, chunk))

    def receive(self, chunk: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive `chunk`.

        Raises:
            PeerLostError: `peer` has died.
        """
        return self._begin(dist.irecv, chunk, peer, tag)

    def expect_answer(self, peer: int, tag: int) -> tuple[dist.Work, int, Tensor]:
        """Begin to receive an answer.

        Raises:
            PeerLostError: `peer` has died.
        """
        answer = torch.empty_like(ANSWER)
        return self.receive(answer, peer, tag), peer, answer

    def complete(self, work: dist.Work, peer: int) -> None:
        """Wait for `work`.

        Raises:
            PeerLostError: `peer` has died, or took too long.
        """
        complete(work, self.name, peer, self.timeout)

    def complete_shipment(self, shipment: Shipment) -> None:
        """Wait until the next ranks have all of `shipment`.

        Raises:
            PeerLostError: one of them has died, or took too long.
        """
        self._drain(shipment.acknowledged)
        if shipment.shipped is not None:
            shipment.shipped.result()
        self._drain(shipment.works)

    def _drain(self, works: deque[tuple[dist.Work, int, Tensor]]) -> None:
        while works:
            work, peer, _ = works.popleft()
            self.complete(work, peer)

    def _begin(self, move: Callable[..., dist.Work | None], chunk: Tensor, peer: int, tag: int) -> dist.Work:
        try:
            work = move(chunk, peer, tag=tag)
        except RuntimeError as error:
            raise PeerLostError(self.name, peer, str(error)) from error
        assert work is not None, "this rank belongs to the default group"
        return work


def chunks(memory: Tensor, count: int) -> Iterator[Tensor]:
    """The uint8 tensor `memory` in `count` chunks whose sizes differ by one byte at most; some may be empty."""
    size = len(memory)
    for number in range(count):
        yield memory[size * number // count : size * (number + 1) // count]
