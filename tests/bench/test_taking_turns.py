"""Steps take turns, and rounds that others disturbed do not count."""

from fxpar.bench.processors import ProcessorUse
from fxpar.bench.turns import Sample, Turn, median_ratio, take_turns, turns_of
from fxpar.launch import run_ranks


def sample(seconds: float, own_s: float) -> Sample:
    return Sample(seconds, ProcessorUse(own_s, all_s=1.5, total_s=2.0))


def test_a_turn_lasts_until_its_last_rank_ends_and_knows_what_others_took() -> None:
    turns = turns_of([{"a": [sample(1.0, 0.5)]}, {"a": [sample(3.0, 0.25)]}])
    assert turns == {"a": [Turn(3.0, others=(1.5 - 0.75) / 2.0)]}


def test_disturbed_rounds_do_not_count_unless_all_are() -> None:
    quiet, loud = 0.1, 0.5
    turns = {
        "a": [Turn(2.0, quiet), Turn(9.0, loud), Turn(4.0, quiet)],
        "b": [Turn(1.0, quiet), Turn(1.0, quiet), Turn(1.0, loud)],
    }
    assert median_ratio(turns, "a", "b", most_others=0.2) == 2.0
    assert median_ratio(turns, "a", "b", most_others=0.0) == 4.0


def order_of_two() -> tuple[list[str], int]:
    """The order in which a rank runs two steps, and how many samples it has of each."""
    order: list[str] = []
    found = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, warm_up=1, repeats=2)
    assert set(map(len, found.values())) == {2}
    return order, len(found)


def test_steps_alternate_who_is_first() -> None:
    assert run_ranks(2, order_of_two) == [(["a", "b", "b", "a", "a", "b"], 2)] * 2
