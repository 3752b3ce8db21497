"""Pause Python's cyclic garbage collector while graphs are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Within, the collector does not run by itself; it runs again afterwards if it did before.

    What imports, traces and passes make is mostly kept, and every collection would visit all of it: that was 30% of a
    launch with 48 layers. Objects without cycles are freed all the same.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _count_as_old()
        gc.enable()


def _count_as_old() -> None:
    """Leave what was made to the next full collection; the next one of young objects would visit it all at once."""
    if not gc.get_freeze_count():  # users, too, may have frozen objects
        gc.freeze()
        gc.unfreeze()
