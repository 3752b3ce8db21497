"""A folder of entries by key, which many processes read and write at once: whole, checked, and bounded in size."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fxpar.environment import cache_folder

LIMIT_BYTES = 2**30
"""The most that all entries take: some thousand compiles. The least recently used are dropped."""

_MAGIC = b"fxpar cache\n"
_DIGEST_BYTES = 32
_LEVEL = 1  # of zlib: graphs repeat themselves, and shrink to a tenth in a millisecond
_PARTIAL = ".partial"
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """Entries in `path`, whose keys are texts that say everything the entry depends on, but for torch and fxpar."""

    path: Path
    limit_bytes: int = LIMIT_BYTES

    def get(self, key: str) -> bytes | None:
        """The entry; None if there is none, or it is damaged, or the folder cannot be read."""
        file = self._file(key)
        try:
            found = _unpacked(file.read_bytes())
            os.utime(file)  # it was used just now
        except (OSError, ValueError, zlib.error):
            return None
        return found

    def put(self, key: str, data: bytes) -> None:
        """Write the entry, or leave it, if the folder cannot be written; readers see all of it or nothing."""
        with contextlib.suppress(OSError):
            file = self._file(key)
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, suffix=_PARTIAL, delete=False) as partial:
                partial.write(_packed(data))
            Path(partial.name).replace(file)
            self._trim()

    def clear(self) -> int:
        """Remove all entries, and what was left of interrupted writes; returns how many files these were."""
        return sum(map(_removed, self._files()))

    def size(self) -> tuple[int, int]:
        """The number of files, and their bytes."""
        sizes = [size for _, size, _ in self._known()]
        return len(sizes), sum(sizes)

    def _file(self, key: str) -> Path:
        return self.path / hashlib.sha256(f"{_version()}\n{key}".encode()).hexdigest()

    def _files(self) -> Iterator[Path]:
        """The folder may hold other things, too: only what has the name of an entry, or of a part of one, counts."""
        with contextlib.suppress(OSError):
            for file in sorted(self.path.iterdir()):
                if file.suffix == _PARTIAL or (len(file.name) == 2 * _DIGEST_BYTES and file.name.isalnum()):
                    yield file

    def _known(self) -> list[tuple[float, int, Path]]:
        """When each file was last used, its size, and its path."""
        found = []
        for file in self._files():
            with contextlib.suppress(OSError):  # another process removed it
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        return found

    def _trim(self) -> None:
        """Remove the least recently used entries until the others are within the limit."""
        known = self._known()
        total = sum(size for _, size, _ in known)
        for _, size, file in sorted(known):
            if total <= self.limit_bytes:
                break
            total -= size
            _removed(file)


def own_cache() -> CacheFolder | None:
    """The cache of this user; None if it is turned off."""
    folder = cache_folder()
    return None if folder is None else CacheFolder(folder)


def _removed(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:  # another process removed it, or it is not ours
        return False
    return True


def _packed(data: bytes) -> bytes:
    packed = zlib.compress(data, _LEVEL)
    return _MAGIC + hashlib.sha256(packed).digest() + packed


def _unpacked(data: bytes) -> bytes:
    """What `_packed` was given.

    Raises:
        ValueError: the bytes are damaged.
    """
    digest, packed = data[len(_MAGIC) :][:_DIGEST_BYTES], data[len(_MAGIC) + _DIGEST_BYTES :]
    if not data.startswith(_MAGIC) or hashlib.sha256(packed).digest() != digest:
        raise ValueError("no entry of this cache, or a damaged one")
    return zlib.decompress(packed)


@cache
def _version() -> str:
    """Entries of other versions of torch or fxpar are never read; fxpar's is a digest of its sources."""
    sources = hashlib.sha256()
    for folder, _, names in sorted(os.walk(_PACKAGE, followlinks=True)):
        for name in sorted(names):
            if name.endswith((".py", ".so")):
                path = Path(folder) / name
                sources.update(f"{path.relative_to(_PACKAGE)}\n".encode() + path.read_bytes())
    return f"torch {torch.__version__} {torch.version.git_version}, fxpar {sources.hexdigest()}"
