"""Actions print as text and are read back from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import Action, parse_action

counts = st.integers(min_value=0, max_value=10_000)
actions = st.builds(Action, counts, st.sampled_from(["F", "I", "W", "B"]), counts)


def test_an_action_prints_as_stage_kind_microbatch() -> None:
    assert str(Action(2, "F", 0)) == "2F0"


@given(actions)
def test_every_action_reads_back_from_what_it_prints(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2f0", "2X0", "2F0 ", "-1F0", "2F0x", "2REDUCE_GRAD", "٣F0"])
def test_what_is_not_an_action_is_rejected_by_name(text: str) -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        parse_action(text)
    assert repr(text) in str(caught.value)
