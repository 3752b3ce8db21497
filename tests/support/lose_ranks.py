"""What ranks find when one of them ends, or fails, in the midst of a step over groups that tell nobody of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import fxpar
from fxpar._torch.distributed import PrefixStore, Store, world_store
from fxpar.runtime.executor import Executor
from fxpar.world import mesh as mesh_module
from fxpar.world import peer_watch
from fxpar.world.lost_peers import naming_lost_peers
from tests.support.mistakes import batch, compiled
from tests.support.queued_groups import (
    BACKEND,
    PATIENCE_S,
    QueuedGroup,
    running_ahead,
    use_queued_groups,
    wait_for_device,
)


class BrokenBatchError(RuntimeError):
    """The error of a rank whose own step fails."""


def be_killed() -> None:
    """End at once, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave_a_child() -> None:
    """End at once, with a child that lives on until the others have noticed; as a worker does that loads data."""
    if os.fork() == 0:
        _store().wait(["all have noticed"], timedelta(minutes=2))
        os._exit(0)
    be_killed()


def fail(*unused: Any) -> None:
    """Fail as a user's step may, and live on."""
    raise BrokenBatchError("class 7 of 3")


def lose_amid_step(
    sizes: dict[str, int],
    lost: int,
    end: Callable[[], None],
    is_watched: bool = True,
    runs_ahead: bool = False,
    join: Callable[[], None] = use_queued_groups,
) -> list[str]:
    """Rank `lost` ends in the midst of the second step: the errors of this rank in that step and in the next.

    Args:
        is_watched: whether ranks watch each other; if not, a wait in that step is soon said to hang.
        runs_ahead: whether the host waits for the device after the step alone, where the loss is read.
        join: forms the world.
    """
    peer_watch.GRACE_S = 0.2
    join()
    with patch.object(mesh_module, "open_connections", mesh_module.open_connections if is_watched else dict):
        mesh = fxpar.init_mesh(**sizes)
    before_computations = _calls_before_computations()
    step = compiled(mesh, fuse=False, check_inputs=False)
    inputs = [value.to(mesh.device_type) for value in batch()]
    step(*inputs)["loss"].backward()
    if not is_watched:
        os.environ[PATIENCE_S] = "1"

    def end_when_others_wait() -> None:
        _store().wait([f"{rank} waits" for rank in range(mesh.num_ranks) if rank != lost])
        end()

    def tell() -> None:
        _store().set(f"{mesh.rank} waits", "")

    def read_loss() -> None:
        with running_ahead():
            loss = step(*inputs)["loss"]
        tell()
        wait_for_device()
        float(loss.detach())

    if mesh.rank == lost:
        before_computations += [end_when_others_wait, lambda: None]
    elif not runs_ahead:
        before_computations.append(tell)
    error = _error_of(read_loss if runs_ahead else lambda: step(*inputs))
    _store().set("all have noticed", "")
    return [error, _error_of(lambda: step(*inputs))]


def _store() -> Store:
    store = world_store()
    assert store is not None, "there are several ranks"
    return store


def _calls_before_computations() -> list[Callable[[], None]]:
    """From now on, each computation of a step calls, and takes from this list, its last function."""
    compute, calls = Executor._compute, list[Callable[[], None]]()

    def call_and_compute(self: Executor, *args: Any) -> None:
        if calls:
            calls.pop()()
        compute(self, *args)

    Executor._compute = call_and_compute  # type: ignore[method-assign]
    return calls


def lose_between_steps() -> tuple[bool, str]:
    """Rank 2 is killed after a step: whether ranks 0 and 1 go on to add numbers without it, for longer than what is
    under way may take to end, and the error of their next step."""
    peer_watch.GRACE_S = 2.0
    use_queued_groups()
    mesh, pair = fxpar.init_mesh(data=3), dist.new_group([0, 1])
    step = compiled(mesh, check_inputs=False)
    step(*batch())
    if mesh.rank == 2:
        be_killed()
    watch, until = peer_watch.peer_watch(), time.monotonic() + 1.2 * peer_watch.GRACE_S
    assert watch is not None, "the backend raises no errors"
    number, both_know = torch.ones(()), torch.zeros(())
    while both_know < 2:
        number = torch.ones(())
        both_know = torch.tensor(float(watch.lost is not None and time.monotonic() > until))
        dist.all_reduce(number, group=pair)
        dist.all_reduce(both_know, group=pair)
    return bool(number == 2), _error_of(lambda: step(*batch()))


def start_anew() -> tuple[float, str, float]:
    """A step, another that fails on rank 1, and one in a world that all ranks form anew: losses and the error."""
    peer_watch.GRACE_S = 0.2
    store = _store()
    use_queued_groups()
    step = compiled(fxpar.init_mesh(pipe=2), check_inputs=False)
    before = float(step(*batch())["loss"].detach())
    with patch.object(Executor, "_finish", fail if dist.get_rank() == 1 else Executor._finish):
        error = _error_of(lambda: step(*batch()))
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, store=PrefixStore("anew", store), rank=rank, world_size=2)
    step = compiled(fxpar.init_mesh(pipe=2), check_inputs=False)
    return before, error, float(step(*batch())["loss"].detach())


def wait_on_the_host() -> str:
    """Rank 1 is killed: the error of a rank whose host waits for it, with no collective under way."""
    peer_watch.GRACE_S = 0.2
    use_queued_groups()
    mesh = fxpar.init_mesh(data=2)
    if mesh.rank == 1:
        be_killed()

    def wait() -> None:
        with naming_lost_peers("what never comes"), naming_lost_peers("a part of it"):
            while True:
                Event().wait(0.01)

    return _error_of(wait)


def be_unable_to_end_a_wait() -> None:
    """The last rank is killed in the midst of a step, and the abort of the others' groups has no effect."""
    peer_watch.LAST_RESORT_S = 0.2
    QueuedGroup.abort = lambda self: None  # type: ignore[method-assign]
    lose_amid_step({"z": 2}, 1, be_killed)


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
