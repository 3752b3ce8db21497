"""The folders in CONTRIBUTING.md are those on disk, in the order of the contract that `lint-imports` checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def contract() -> list[set[str]]:
    """The modules and folders of each layer, from top to bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in settings["contracts"] if each["id"] == "layers")
    return [set(layer.split(" | ")) for layer in layers]


def listed() -> list[str]:
    """The modules and folders of `fxpar/` in CONTRIBUTING.md, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text[text.index("```\nfxpar/") : text.index("\nlowering/", text.index("```\nfxpar/"))]
    names = re.findall(r"(?:^|  )(\w+)(?:/|\.py)(?=\s)", tree.partition("\n")[2].partition("\n")[2], re.MULTILINE)
    return [name for name in names if name != "__init__"]


def on_disk() -> set[str]:
    found = (path for path in (ROOT / "fxpar").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
    return {path.stem for path in found} - {"__init__"}


def test_contract_docs_and_disk_have_one_list() -> None:
    layers = contract()
    assert set(listed()) == set().union(*layers) == on_disk()
    assert len(listed()) == len(set(listed()))
    places = {name: place for place, layer in enumerate(layers) for name in layer}
    order = [places[name] for name in listed()]
    assert order == sorted(order), f"CONTRIBUTING.md lists {listed()}, not in the order of {layers}"


def test_the_root_of_the_package_stays_small() -> None:
    assert len(list((ROOT / "fxpar").glob("*.py"))) <= 15
