"""Each change of a setup changes one thing, and only to what is possible."""

from __future__ import annotations

from typing import Any

from fxpar.explainer.neighbours import (
    layout_changes,
    mesh_changes,
    microbatch_changes,
    option_changes,
    schedule_changes,
)
from fxpar.explainer.setup import Setup, read_setup


def setup(mesh: str, microbatches: int = 1, **given: Any) -> Setup:
    values = {"schedule": "1f1b", "stages": None, "layouts": None, "options": None, **given}
    return read_setup(mesh, microbatches, **values)


def test_numbers_of_microbatches_divide_the_batch() -> None:
    changes = microbatch_changes(setup("pipe=2 data=2", 4), 48, fits=True)
    assert [each.setup.microbatches for each in changes] == [2, 8], "halves, doubles and multiples of the pipe axis"
    assert not list(microbatch_changes(setup("pipe=2"), None, fits=True))


def test_without_a_pipeline_more_microbatches_only_save_memory() -> None:
    given = setup("data=2", 4)
    assert [each.setup.microbatches for each in microbatch_changes(given, 64, fits=True)] == [1, 2]
    assert [each.setup.microbatches for each in microbatch_changes(given, 64, fits=False)] == [1, 2, 8]


def test_a_factor_of_one_axis_moves_to_another() -> None:
    found = {each.text for each in mesh_changes(setup("x=4"), 8)}
    assert {"init_mesh(data=2, x=2)", "init_mesh(data=4)", "init_mesh(z=2, x=2)", "init_mesh(y=2, x=2)"} <= found
    assert {"init_mesh(pipe=2, x=2)", "init_mesh(pipe=2, x=2), microbatches=8"} <= found
    assert not any("init_mesh(y=4)" in text for text in found), "it is x=4 by another name"
    assert all(each.setup.configuration.mesh != setup("x=4").mesh for each in mesh_changes(setup("x=4"), 8))


def test_a_mesh_keeps_its_microbatches_unless_the_pipe_axis_or_the_batch_asks_for_others() -> None:
    kept = {
        each.setup.microbatches for each in mesh_changes(setup("data=2 x=2", 4), 64) if each.setup.mesh["pipe"] == 1
    }
    assert kept == {4}
    fewer = [each.setup for each in mesh_changes(setup("data=2 x=2", 4), 8)]
    assert {each.microbatches for each in fewer if each.mesh["data"] == 4} == {2}


def test_stages_and_schedules_of_a_user_last_as_long_as_the_pipe_axis() -> None:
    own = "0F0 0B0\n1F0 1B0"
    given = setup("pipe=2 data=2", schedule=own, stages=["layers.1"])
    for each in mesh_changes(given, 64):
        stays = each.setup.mesh["pipe"] == 2
        assert each.setup.stages == (("layers.1",) if stays else None)
        assert (each.setup.schedule == "0F0 0B0\n1F0 1B0") == (stays and each.setup.microbatches == 1)
    assert {each.setup.schedule for each in microbatch_changes(given, 64, fits=True)} == {"eager-1f1b"}


def test_schedules_run_as_many_stages_as_there_are() -> None:
    names = {each.setup.schedule for each in schedule_changes(setup("pipe=2"))}
    assert names == {"eager-1f1b", "eager-1f1b-delayed", "zb-h1", "zb-h2", "interleaved"}
    changes = list(schedule_changes(setup("pipe=2", stages=["layers.1"])))
    assert "interleaved" not in {each.setup.schedule for each in changes}
    assert [each.setup.stages for each in changes if each.kind == "stages"] == [2]
    assert not list(schedule_changes(setup("data=2")))


def test_options_that_cost_time_are_dropped_and_those_that_save_memory_taken_where_it_lacks() -> None:
    def texts(given: Setup, *, fits: bool) -> set[str]:
        return {each.text for each in option_changes(given, fits=fits)}

    given = setup("z=2", options={"remat": "min_cut", "overlap": False, "fuse": False, "gather_weights": "microbatch"})
    unchanged = {"options={'gather_weights': 'auto'}", "options={'overlap': True}", "options={'fuse': True}"}
    assert texts(given, fits=True) == {"options={'remat': 'none'}", *unchanged}
    assert texts(given, fits=False) == {
        "options={'remat': 'full'}",
        "options={'remat': 'full', 'gathered_bytes': 0}",
        *unchanged,
    }
    assert not texts(setup("data=2"), fits=True)


def test_hints_are_left_out_one_by_one_and_others_laid_over_them() -> None:
    hints = {"a.weight": ("x", None), "b.weight": (None, "x")}
    found = list(layout_changes(setup("x=2", layouts=hints), ships_plan=False, hints={"c.weight": [("x", None)]}))
    assert [each.setup.layouts for each in found] == [
        "search",
        {"b.weight": (None, "x")},
        {"a.weight": ("x", None)},
        {**hints, "c.weight": ("x", None)},
    ]
    assert not list(layout_changes(setup("data=2", layouts=hints), ships_plan=True, hints={}))
    assert [each.setup.layouts for each in layout_changes(setup("x=2"), ships_plan=True, hints={})] == ["search"]
