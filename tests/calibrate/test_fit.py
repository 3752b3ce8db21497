"""A latency and a rate come out of times of messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.calibrate.fit import Line, fit_line

SIZES = (1e2, 1e4, 1e6, 1e7)


@given(st.floats(0.1, 1e4), st.floats(1.0, 1e5))
def test_exact_times_give_back_the_line_that_they_are_on(latency_us: float, bytes_per_us: float) -> None:
    line = Line(latency_us, bytes_per_us)
    found = fit_line([(size, line.time_us(size)) for size in SIZES])
    assert found.bytes_per_us == pytest.approx(bytes_per_us, rel=1e-2)
    assert found.time_us(1e2) == pytest.approx(line.time_us(1e2), rel=1e-2)


def test_small_messages_tell_the_latency_though_large_ones_scatter_more_than_it() -> None:
    found = fit_line([(1e2, 51.0), (1e2, 49.0), (1e7, 1.1e5), (1e7, 0.9e5)])
    assert found.latency_us == pytest.approx(50, rel=0.05)
    assert found.bytes_per_us == pytest.approx(100, rel=0.05)


def test_neither_figure_is_ever_negative_or_infinite() -> None:
    assert fit_line([(1e2, 0.0001), (1e6, 10.0)]).latency_us > 0
    falling = fit_line([(1e2, 10.0), (1e6, 5.0)])
    assert falling.bytes_per_us == 1e6 / 5
