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


def freeze_objects() -> None:
    """`gc.freeze()`: no collection visits what there is now. It is remembered, since counting it visits all of it."""
    global _are_objects_frozen
    gc.freeze()
    _are_objects_frozen = True


def _count_as_old() -> None:
    """Leave what was made to the next full collection; the next one of young objects would visit it all at once."""
    global _are_objects_frozen
    _are_objects_frozen = _are_objects_frozen or gc.get_freeze_count() > 0  # users, too, may have frozen objects
    if not _are_objects_frozen:
        gc.freeze()
        gc.unfreeze()


_are_objects_frozen = False
"""Whether some ever were: counting a million and a half, once frozen, took a fifth of a second."""
