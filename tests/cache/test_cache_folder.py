"""Entries are whole, or they are not there: under damage, under concurrent writers, and beyond the limit."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.cache import folder as module
from fxpar.cache.folder import CacheFolder, own_cache
from fxpar.cli import main


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new" / "folder")
    assert folder.get("key") is None
    folder.put("key", b"data" * 1000)
    assert folder.get("key") == b"data" * 1000
    assert folder.get("another key") is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 255), st.sampled_from(["flip", "cut", "empty", "foreign"]))
def test_a_damaged_entry_is_a_miss(tmp_path_factory: pytest.TempPathFactory, at: int, bits: int, damage: str) -> None:
    folder = CacheFolder(tmp_path_factory.mktemp("cache"))
    folder.put("key", bytes(range(256)) * 4)
    (file,) = folder.path.iterdir()
    whole = bytearray(file.read_bytes())
    at %= len(whole)
    if damage == "flip":
        whole[at] ^= bits
    file.write_bytes({"cut": whole[:at], "empty": b"", "foreign": os.urandom(at)}.get(damage, whole))
    assert folder.get("key") is None
    folder.put("key", b"again")
    assert folder.get("key") == b"again"


def test_other_versions_have_other_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CacheFolder(tmp_path)
    folder.put("key", b"data")
    monkeypatch.setattr(module, "_version", lambda: "torch 9, fxpar 9")
    assert folder.get("key") is None


def test_the_least_recently_used_are_dropped(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, limit_bytes=3500)
    for number, key in enumerate("abc"):
        folder.put(key, os.urandom(1000))
        os.utime(folder._file(key), (number, number))
    assert folder.get("a") is not None  # now the latest
    folder.put("d", os.urandom(1000))
    assert [key for key in "abcd" if folder.get(key) is None] == ["b"]


def test_what_cannot_be_written_or_read_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = CacheFolder(tmp_path / "file")
    folder.put("key", b"data")
    assert folder.get("key") is None
    assert folder.clear() == 0


def test_clear_removes_entries_and_leaves_other_files(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    folder.put("a", b"1")
    folder.put("b", b"2")
    (tmp_path / "interrupted.partial").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    assert folder.clear() == 3
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def _write_and_read(path: Path) -> bool:
    folder = CacheFolder(path, limit_bytes=200_000)
    right = True
    for turn in range(100):
        folder.put(f"key {turn % 7}", bytes([turn % 7]) * 100_000)
        found = folder.get(f"key {(turn + 3) % 7}")
        right &= found is None or found == bytes([(turn + 3) % 7]) * 100_000
    return right


def test_readers_and_writers_at_once_see_whole_entries(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as processes:
        assert all(processes.map(_write_and_read, [tmp_path] * 4))
    assert not list(tmp_path.glob("*.partial"))


def test_the_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_CACHE_DIR", "")
    assert own_cache() is None
    monkeypatch.setenv("FXPAR_CACHE_DIR", str(tmp_path))
    assert own_cache() == CacheFolder(tmp_path)
    monkeypatch.delenv("FXPAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert own_cache() == CacheFolder(tmp_path / "xdg" / "fxpar")


def test_the_command_shows_and_clears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FXPAR_CACHE_DIR", str(tmp_path))
    CacheFolder(tmp_path).put("key", os.urandom(100_000))
    assert main(["cache"]) == 0
    assert "1 entries, 0.1 MB of at most 1074 MB" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert "removed 1 files" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("FXPAR_CACHE_DIR", "")
    assert main(["cache"]) == 0
    assert "nothing is kept" in capsys.readouterr().out
