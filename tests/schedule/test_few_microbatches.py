"""Fewer microbatches than stages work, with a warning that tells what that wastes."""

import pytest

from fxpar.schedule import SCHEDULE_NAMES, build_schedule, chain, few_microbatches_warning


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "interleaved"])
def test_the_warning_tells_the_bubble_share(name: str) -> None:
    warning = few_microbatches_warning(build_schedule(name, 4, 2), chain(4))
    assert warning == (
        f"{name}: 2 microbatches for 4 pipe ranks: at least 60% of the step is bubble, in which ranks do nothing; "
        "with 4 microbatches or more all of them work at once"
    )  # (S - 1) / (m + S - 1)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_as_many_microbatches_as_stages_are_enough(name: str) -> None:
    assert few_microbatches_warning(build_schedule(name, 4, 4), chain(4)) is None


def test_stages_that_share_a_rank_want_microbatches_for_their_ranks() -> None:
    assert few_microbatches_warning(build_schedule("interleaved", 4, 2, num_ranks=2), chain(4)) is None
    assert few_microbatches_warning(build_schedule("interleaved", 4, 1, num_ranks=2), chain(4)) is not None
