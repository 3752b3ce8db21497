"""The pause of the garbage collector."""

import gc
from collections.abc import Iterator

import pytest

from fxpar import garbage_collection
from fxpar.garbage_collection import freeze_objects, garbage_collection_paused
from tests.support.garbage import collect_garbage_seldom


@pytest.fixture(autouse=True)
def _as_in_a_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With PyTorch's objects unfrozen, and Python's own thresholds."""
    gc.unfreeze()
    monkeypatch.setattr(garbage_collection, "_are_objects_frozen", False)
    gc.set_threshold(700, 10, 10)
    yield
    collect_garbage_seldom()


def test_nothing_is_collected_within_and_something_is_afterwards() -> None:
    collections: list[str] = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with garbage_collection_paused(), garbage_collection_paused():
            made: list[list[int]] = [[] for _ in range(100_000)]
        assert not collections
        made += [[] for _ in range(1_000)]
        assert collections
    finally:
        gc.callbacks.pop()


def test_what_was_made_within_is_old_afterwards() -> None:
    with garbage_collection_paused():
        made: list[list[int]] = [[] for _ in range(100_000)]
    assert len(gc.get_objects(generation=2)) > len(made)
    assert sum(len(gc.get_objects(generation=young)) for young in (0, 1)) < len(made)


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with garbage_collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_runs_again_after_an_error() -> None:
    with pytest.raises(KeyError), garbage_collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_what_the_user_froze_stays_frozen() -> None:
    frozen: list[object] = []
    gc.freeze()
    with garbage_collection_paused():
        pass
    assert all(each is not frozen for each in gc.get_objects()), "those that are frozen are not listed"


def test_objects_that_are_known_to_be_frozen_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_objects()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it visits all objects"))
    with garbage_collection_paused():
        pass
