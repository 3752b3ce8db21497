"""Figures as people write them."""

from __future__ import annotations


def percent(share: float) -> str:
    """A share, with a decimal where it is small."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def time_text(time_us: float) -> str:
    """Three digits in us, ms or s."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if time_us >= factor:
            return f"{time_us / factor:.3g} {unit}" if time_us < 1e3 * factor else f"{time_us / factor:,.0f} {unit}"
    return f"{time_us:.3g} us"


def bytes_text(num_bytes: float) -> str:
    """Three digits in bytes, kB, MB, GB or TB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}" if num_bytes < 1e3 * factor else f"{num_bytes / factor:,.0f} {unit}"
            )
    return f"{num_bytes:.0f} bytes"


def rate_text(bytes_per_us: float) -> str:
    """A rate per second."""
    return f"{bytes_text(1e6 * bytes_per_us)}/s"


def counted(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
