"""What others take of the processors is what is left of all that was used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fxpar.bench.measure.processors import ProcessorUse, share_of_others


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


SPIN = "import time\nwhile time.process_time() < 0.3: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is of Linux")
def test_what_processes_of_this_one_do_counts_as_its_own_where_asked_for() -> None:
    before, alone = ProcessorUse.now(with_children=True), ProcessorUse.now()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert ProcessorUse.now(with_children=True).since(before).own_s > 0.2, "that has ended"
    assert ProcessorUse.now().since(alone).own_s < 0.2
    with subprocess.Popen([sys.executable, "-c", f"{SPIN}\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        before = ProcessorUse.now(with_children=True)
        child.stdout.readline()
        assert ProcessorUse.now(with_children=True).since(before).own_s > 0.1, "that still runs"
        child.communicate(b"\n")
