"""How much memory of the CPU's allocator something takes, by what the allocator tells the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """The most that is allocated at once during `run`, beyond what was before; what that frees is not seen.

    Nor is what threads of gloo free: those that are late to let go of a collective's tensors make it seem more.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    assert found.profiler is not None
    changes = sorted(_changes(found.profiler.kineto_results.experimental_event_tree()))
    return max(accumulate(num_bytes for _, num_bytes in changes), default=0)


def _changes(events: list[Any]) -> Iterator[tuple[int, int]]:
    """When how many bytes were allocated, or with a minus freed."""
    for event in events:
        if str(event.tag) == "_EventType.Allocation":
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _changes(event.children)
