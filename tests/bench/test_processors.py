"""What others take of the processors is what is left of all that was used."""

from __future__ import annotations

import sys

import pytest

from fxpar.bench.processors import ProcessorUse, share_of_others


def test_others_take_what_these_processes_did_not() -> None:
    used = [ProcessorUse(own_s=3.0, all_s=9.5, total_s=19.0), ProcessorUse(own_s=1.0, all_s=10.0, total_s=20.0)]
    assert share_of_others(used) == pytest.approx((10 - 4) / 20)


def test_counts_that_the_kernel_rounds_make_no_share_below_none() -> None:
    assert share_of_others([ProcessorUse(own_s=1.001, all_s=1.0, total_s=2.0)]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is of Linux")
def test_what_this_process_does_counts_as_its_own_and_as_the_machine_s() -> None:
    before = ProcessorUse.now()
    while (used := ProcessorUse.now().since(before)).own_s < 0.2:
        sum(range(10_000))
    assert used.all_s > 0.1, "the kernel counts in hundredths"
    assert used.total_s >= used.own_s
