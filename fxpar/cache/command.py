"""The command: show what the cache holds, or clear it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from fxpar.cache.folder import own_cache


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--clear", action="store_true", help="remove all entries")


def run(options: Namespace, console: Console) -> int:
    """Print the folder and its size, or clear it; returns the exit status."""
    cache = own_cache()
    if cache is None:
        console.print("nothing is kept: FXPAR_CACHE_DIR is empty")
        return 0
    if options.clear:
        console.print(f"{cache.path}: removed {cache.clear()} files")
        return 0
    count, num_bytes = cache.size()
    console.print(
        f"{cache.path}: {count} entries, {num_bytes / 1e6:.1f} MB of at most {cache.limit_bytes / 1e6:.0f} MB"
    )
    return 0
