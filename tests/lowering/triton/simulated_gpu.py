"""A GPU on the CPU, one for each rank's process: streams, a copy engine, shared memory, and kernels interpreted.

What the host tells a stream is done later, by a thread of the stream, after a pause of any length. Only copies of
memory in one piece are done beside a kernel, as by a copy engine: all else needs multiprocessors, which a kernel that
waits may fill. Memory that nothing was written to is not a number. What waits in vain times out, and nothing runs on a
GPU after a failure.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import interpreter_builder

from fxpar.lowering.triton import copies, launch, plan, scatter, workspace

aten = torch.ops.aten

PROGRAMS = 3
"""How many of a kernel run at a time; the interpreter runs one after another."""

_LONGEST_PAUSES_S = (0.0, 0.001, 0.008)
"""A stream keeps to one of these for some time, so that at times one is far behind another."""

_KEPT = 8
_POLL_S = 0.0002

_NEW_MEMORY = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)
"""What the host does itself, besides views: memory is allocated as it is asked for."""


class Gpu:
    """This rank's: its streams, and what happened that must not."""

    def __init__(self, seed: int, patience_s: float) -> None:
        self.random = random.Random(seed)
        self.patience_s = patience_s
        self.failures: list[BaseException] = []
        self.kernels = threading.Lock()
        self.streams: list[Stream] = []
        self.main = Stream(self)
        self.current = self.main

    def synchronize(self, device: object = None) -> None:
        """Wait for all that any stream was told."""
        for stream in self.streams:
            stream.drain()

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Inside, `stream` is the current one."""
        self.current, before = stream, self.current
        yield
        self.current = before

    def start(self, call: launch.Call, programs: int) -> None:
        """Let the current stream run a kernel."""
        kernel, arguments, constants = call.kernel, call.arguments, call.constants
        self.current.tell(lambda: kernel[(programs,)](*arguments, **constants), needs_processors=True)

    def set_signal(self, signal: Tensor, value: int) -> None:
        """Let the current stream write `value`."""
        self.current.tell(lambda: signal.numpy().__setitem__(0, launch.wrapped(value)), needs_processors=False)

    def await_signal(self, signal: Tensor, value: int) -> None:
        """Let the current stream wait until `signal` is `value` or later."""

        def wait() -> None:
            deadline, found = time.monotonic() + self.patience_s, signal.numpy()
            while launch.wrapped(int(found[0]) - value) < 0:
                _expect(time.monotonic() < deadline, "a signal")
                time.sleep(_POLL_S)

        self.current.tell(wait, needs_processors=False)


class Stream:
    """Does what it is told in order, some time later."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.is_main = not gpu.streams
        gpu.streams.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def tell(self, work: Callable[[], None], *, needs_processors: bool) -> None:
        def do() -> None:
            if needs_processors:
                with self._gpu.kernels:
                    work()
            else:
                work()

        self._work.put(do)

    def wait_stream(self, other: Stream) -> None:
        done = threading.Event()
        other.tell(done.set, needs_processors=False)
        self.tell(lambda: _expect(done.wait(self._gpu.patience_s), "another stream"), needs_processors=False)

    def drain(self) -> None:
        done = threading.Event()
        self.tell(done.set, needs_processors=False)
        while not done.wait(10 * _POLL_S) and not self._gpu.failures:
            pass
        if self._gpu.failures:
            raise self._gpu.failures[0]

    def _run(self) -> None:
        longest_s = 0.0
        for count in itertools.count():
            work = self._work.get()
            if count % _KEPT == 0:
                longest_s = self._gpu.random.choice(_LONGEST_PAUSES_S)
            time.sleep(self._gpu.random.uniform(0, longest_s))
            try:
                if not self._gpu.failures:
                    work()
            except BaseException as error:
                self._gpu.failures.append(error)


def _expect(came: bool, awaited: str) -> None:
    if not came:
        raise TimeoutError(f"a deadlock: nothing came of waiting for {awaited}")


class _Deferred(TorchDispatchMode):
    """Inside, the host tells the current stream what it calls."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default or func.namespace == "c10d":
            self._gpu.synchronize()
            return func(*args, **kwargs)
        if func.overloadpacket in _NEW_MEMORY:
            return _of_no_numbers(func(*args, **kwargs))
        if func.is_view or func is aten._unsafe_view.default or not any(_tensors(args)):
            return func(*args, **kwargs)
        if func._schema.arguments[0].is_write:
            self._tell(lambda: func(*args, **kwargs), func, args)
            return args[0]
        like = func(*pytree.tree_map_only(Tensor, _on_meta, args), **kwargs)
        out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self._tell(lambda: out.copy_(func(*args, **kwargs)), func, args)
        return out

    def _tell(self, work: Callable[[], Any], func: Any, args: tuple[Any, ...]) -> None:
        is_copy = func.overloadpacket is aten.copy_ and all(each.is_contiguous() for each in args[:2])
        self._gpu.current.tell(work, needs_processors=not is_copy)


def _tensors(args: Any) -> Iterator[bool]:
    yield from (isinstance(each, Tensor) for each in pytree.tree_leaves(args))


def _of_no_numbers(memory: Tensor) -> Tensor:
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory


def _on_meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class SymmetricMemory:
    """The memory of all ranks, each a file that all have mapped."""

    multicast_ptr = 0

    def __init__(self, memories: list[Tensor]) -> None:
        self._memories, self.world_size = memories, len(memories)

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        memory = self._memories[rank].view(dtype)
        return memory[storage_offset : storage_offset + torch.Size(shape).numel()].view(shape)


class SharedFiles:
    """Memory of this rank that others can map: files in a folder that is the same on all ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()

    def sharable_memory(self, num_bytes: int, device: object) -> Tensor:
        """New memory of this rank."""
        path = self._folder / f"{next(self._count)}.{dist.get_rank()}"
        path.write_bytes(b"\xff" * num_bytes)  # not a number, of any dtype
        memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        memory.path = path  # type: ignore[attr-defined]
        return memory

    def symmetric_memory(self, memory: Any, group: object) -> SymmetricMemory:
        """That which all ranks have made at the same time."""
        dist.barrier()
        paths = [memory.path.with_suffix(f".{other}") for other in range(dist.get_world_size())]
        size = memory.numel()
        found = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
        dist.barrier()
        return SymmetricMemory(found)


class _Looks:
    """A kernel that waits sleeps between its looks at a signal, so that the CPU is free for others, and times out."""

    def __init__(self, patience_s: float) -> None:
        self._look, self._patience_s = interpreter_builder.create_atomic_rmw, patience_s
        self._pointer, self._deadline = 0, 0.0

    def __call__(self, op: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        is_look = not value.data.any()
        if is_look and pointer.data.item() == self._pointer:
            _expect(time.monotonic() < self._deadline, "a signal in a kernel")
            time.sleep(_POLL_S)
        else:
            self._pointer = pointer.data.item() if is_look else 0
            self._deadline = time.monotonic() + self._patience_s
        return self._look(op, pointer, value, *rest)


@contextmanager
def simulated_gpu(folder: Path, seed: int, patience_s: float) -> Iterator[Gpu]:
    """Inside, the fused ops of `lowering/triton` run on this rank's GPU; `folder` is the same on all ranks.

    patience_s: how long anything waits before that counts as a deadlock.
    """
    gpu, files = Gpu(seed, patience_s), SharedFiles(folder)
    pretended = [
        (torch.cuda, "Stream", lambda device, priority=0: Stream(gpu)),
        (torch.cuda, "current_stream", lambda device=None: gpu.current),
        (torch.cuda, "stream", gpu.on_stream),
        (torch.cuda, "synchronize", gpu.synchronize),
        (workspace, "sharable_memory", files.sharable_memory),
        (workspace, "symmetric_memory", files.symmetric_memory),
        (launch.Call, "run", lambda call, programs: gpu.start(call, programs)),  # a function, so that it gets the call
        (plan.Fused, "programs", lambda self, device: PROGRAMS),
        (copies, "set_signal", gpu.set_signal),
        (copies, "await_signal", gpu.await_signal),
        (interpreter_builder, "create_atomic_rmw", _Looks(patience_s)),
    ]
    assert vars(scatter)["on_copy_stream"] is copies.on_copy_stream, "what is pretended for one holds for the other"
    with ExitStack() as stack:
        for owner, name, instead in pretended:
            stack.enter_context(patch.object(owner, name, instead))
        stack.enter_context(_Deferred(gpu))
        yield gpu
