"""Signals wake whoever waits for their value, asleep until then; a heap's blocks never overlap and are used again."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.core.shared_memory import SIGNAL_BYTES, Heap, Signal
from fxpar.errors import SharedMemoryError

MIB = 1 << 20
NEVER_S = 1000.0  # longer than a test may hang


@pytest.fixture
def memory() -> Iterator[list[Signal]]:
    """Four signals of value 0."""
    words = ctypes.create_string_buffer(5 * SIGNAL_BYTES)
    first = -(-ctypes.addressof(words) // SIGNAL_BYTES) * SIGNAL_BYTES
    yield [Signal(first + i * SIGNAL_BYTES) for i in range(4)]


def test_a_value_that_is_reached_is_not_waited_for(memory: list[Signal]) -> None:
    memory[0].set(7)
    assert memory[0].value == 7
    assert memory[0].wait(7, NEVER_S)
    assert memory[0].wait(3, NEVER_S)
    assert memory[1].value == 0


def test_a_value_that_never_comes_is_waited_for_asleep(memory: list[Signal]) -> None:
    began, began_running = time.monotonic(), time.thread_time()
    assert not memory[0].wait(1, 0.3)
    elapsed, running = time.monotonic() - began, time.thread_time() - began_running
    assert elapsed >= 0.3
    assert running < 0.1 * elapsed, f"ran for {running} s of {elapsed} s"


@pytest.mark.parametrize("start", [0, 2**32 - 15_000])
def test_two_threads_answer_each_other_and_no_wake_is_lost(memory: list[Signal], start: int) -> None:
    rounds = 30_000  # a hole between looking and sleeping would be a few instructions wide
    ping, pong = memory[:2]
    for end in (ping, pong):
        end.set(start)

    def answer() -> None:
        for i in range(start + 1, start + rounds + 1):
            ping.wait(i, NEVER_S)
            pong.set(i)

    thread = Thread(target=answer, daemon=True)
    thread.start()
    for i in range(start + 1, start + rounds + 1):
        ping.set(i)
        assert pong.wait(i, NEVER_S)
    thread.join()


@pytest.mark.parametrize("value", [1, 2**32, 2**63])
def test_every_waiter_is_woken_even_by_a_value_of_equal_low_bits(memory: list[Signal], value: int) -> None:
    reached: list[bool] = []
    threads = [Thread(target=lambda: reached.append(memory[0].wait(value, NEVER_S)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    memory[0].set(0)  # reaches nothing: who is asleep already goes back to sleep
    memory[0].set(value)
    for thread in threads:
        thread.join()
    assert reached == [True] * 4


def test_an_interrupt_ends_a_wait_so_that_its_handler_runs(memory: list[Signal]) -> None:
    handled = []
    before = signal.signal(signal.SIGALRM, lambda *_: handled.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        assert not memory[0].wait(1, NEVER_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled


@contextmanager
def heap_of(capacity: int) -> Iterator[tuple[Heap, int]]:
    """A heap over a file without a name, and the file."""
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, capacity)
        yield Heap(fd, capacity), fd
    finally:
        os.close(fd)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 200) | st.integers(0, 3 * MIB)),
        st.tuples(st.just("free"), st.integers(0, 100)),
    ),
    max_size=80,
)


@given(actions)
def test_blocks_are_aligned_and_apart_and_their_pages_are_committed(actions: list[tuple[str, int]]) -> None:
    with heap_of(1 << 30) as (heap, fd):
        sizes: dict[int, int] = {}
        for action, argument in actions:
            if action == "allocate":
                offset = heap.allocate(argument)
                assert offset > 0 and offset % 64 == 0 and offset not in sizes
                sizes[offset] = argument
            elif sizes:
                freed = list(sizes)[argument % len(sizes)]
                heap.free(freed)
                del sizes[freed]
            ends = [offset + size for offset, size in sorted(sizes.items())]
            assert all(end <= begin for end, begin in zip(ends, sorted(sizes)[1:], strict=False)), sizes
            assert not ends or ends[-1] <= 1 << 30
        assert sum(sizes.values()) <= heap.bytes_in_use <= heap.committed_bytes
        assert os.fstat(fd).st_blocks * 512 == heap.committed_bytes, "pages are there before they are touched"


@given(
    st.lists(st.integers(65, 2 * MIB), min_size=1, max_size=40).flatmap(
        lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))
    )
)
def test_freed_neighbours_become_one_block(case: tuple[list[int], list[int]]) -> None:
    sizes, order = case
    with heap_of(1 << 30) as (heap, _):
        offsets = [heap.allocate(size) for size in sizes]
        for i in order:
            heap.free(offsets[i])
        assert heap.bytes_in_use == 0
        assert heap.reuse(sum(-(-size // 64) * 64 for size in sizes)) is not None


def test_what_was_freed_is_used_again_and_nothing_grows() -> None:
    generator = random.Random(0)
    sizes = [generator.choice([64, 1000, 100_000, MIB, 5 * MIB]) for _ in range(50)]
    with heap_of(1 << 30) as (heap, _):
        committed = []
        for _ in range(3):
            held: list[int] = []
            for size in sizes:
                if len(held) == 5:
                    heap.free(held.pop(0))
                held.append(heap.allocate(size))
            for offset in held:
                heap.free(offset)
            committed.append(heap.committed_bytes)
        assert committed == [committed[0]] * 3


def test_small_blocks_do_not_cut_up_the_room_of_large_ones() -> None:
    with heap_of(1 << 30) as (heap, _):
        large = []
        for _ in range(10):
            large.append(heap.allocate(MIB))
            heap.allocate(64)
        for offset in large:
            heap.free(offset)
        assert heap.reuse(10 * MIB) is not None


def test_memory_beyond_the_capacity_is_refused_and_the_rest_still_serves() -> None:
    with heap_of(4 * MIB) as (heap, _):
        half = heap.allocate(2 * MIB)
        for too_much in (3 * MIB, 5 * MIB, 2**63):
            with pytest.raises(
                SharedMemoryError, match=rf"allocate {too_much} bytes beside {2 * MIB} in use.*No space"
            ):
                heap.allocate(too_much)
            assert heap.reuse(too_much) is None
        heap.free(half)
        assert heap.allocate(3 * MIB) == half


def test_what_the_kernel_refuses_is_an_error_and_not_a_crash_at_first_touch() -> None:
    with heap_of(4 * MIB) as (_, fd):
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            with pytest.raises(SharedMemoryError, match=r"Bad file descriptor.*FXPAR_HOST"):
                Heap(read_only, 4 * MIB).allocate(1)
        finally:
            os.close(read_only)


def test_a_block_is_freed_once() -> None:
    with heap_of(4 * MIB) as (heap, _):
        offset = heap.allocate(1000)
        heap.free(offset)
        with pytest.raises(AssertionError, match=f"no block begins at {offset}"):
            heap.free(offset)
