"""Tracing makes millions of objects, nearly all of which live on: looking for garbage among them takes its time."""

from __future__ import annotations

import gc

from fxpar.garbage_collection import freeze_objects


def collect_garbage_seldom() -> None:
    """Never look at what was imported; look at the rest after so many objects that it is a small part of the work."""
    gc.collect()
    freeze_objects()
    gc.set_threshold(2_000_000, 50, 100)
