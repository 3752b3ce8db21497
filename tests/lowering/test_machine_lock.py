"""One holder at a time for one work, any number for different works, and none after its holder's death."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Barrier, Thread

import pytest

from fxpar.lowering.machine_lock import machine_lock
from fxpar.world.launch import RankFailedError, run_ranks


def add_up(folder: str, times: int) -> None:
    """Count in a file, in a way that loses counts if others do so at the same time."""
    count = Path(folder, "count")
    for _ in range(times):
        with machine_lock(Path(folder), "count"):
            count.write_text(str(int(count.read_text()) + 1))


def die_with_the_lock(folder: str) -> None:
    with machine_lock(Path(folder), "count"):
        os._exit(1)


def test_processes_take_turns(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    run_ranks(2, add_up, str(tmp_path), 300)
    assert (tmp_path / "count").read_text() == "600"


def test_different_works_go_on_at_once(tmp_path: Path) -> None:
    both_inside = Barrier(2, timeout=60)

    def work(name: str) -> None:
        with machine_lock(tmp_path, name):
            both_inside.wait()

    threads = [Thread(target=work, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both_inside.broken


def test_nobody_waits_for_the_dead(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    with pytest.raises(RankFailedError, match="ended without a result"):
        run_ranks(1, die_with_the_lock, str(tmp_path))
    add_up(str(tmp_path), 1)
    assert (tmp_path / "count").read_text() == "1"
