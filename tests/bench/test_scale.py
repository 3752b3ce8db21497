"""The benchmark of scale counts the time of every part of planning and of a rank's passes."""

from __future__ import annotations

from fxpar.bench.compile.scale import PASSES, PLANNING, PREPARING, Configuration, measure
from fxpar.bench.compile.scale_models import GPT_80B, LLAMA_405B, scale_model


def test_every_part_counts() -> None:
    measured = measure(Configuration(layers=2, pipe=2, microbatches=2))
    assert measured.seconds.keys() == {*PLANNING, *PASSES} | {"import", *PREPARING}
    assert 0 < measured.growing_s < sum(measured.seconds.values())
    assert measured.peak_bytes > 1e8


def test_models_have_their_published_sizes() -> None:
    for name, layers, billions in ((LLAMA_405B, 126, 405.9), (GPT_80B, 42, 77.4)):
        model, _ = scale_model(name, layers, kinds=1, batch=1)
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1) == billions


def test_kinds_of_layers_differ_in_width() -> None:
    model, _ = scale_model("small", layers=6, kinds=3, batch=1)
    widths = [parameter.shape[0] for name, parameter in model.named_parameters() if name.endswith("mlp.fc.weight")]
    assert len(set(widths)) == 3 and widths == sorted(widths)
