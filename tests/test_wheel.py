"""`python -m build` makes a wheel for every Python of a platform, from which `fxpar demo` runs without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest

import fxpar

ROOT = Path(__file__).parents[1]
SOURCES = ("csrc", "examples", "fxpar", "lowering", "LICENSE", "README.md", "pyproject.toml", "setup.py")
DEMO = ("--processes", "2", "--steps", "2", "--", "--layers", "2", "--hidden", "32", "--lowering", "aten")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as anyone would: of a source distribution of the sources, without what was built here."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            built = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=built)
        else:
            shutil.copy(ROOT / name, folder)
    _run([sys.executable, "-m", "build", "--no-isolation"], folder)
    (built_wheel,) = (folder / "dist").glob("*.whl")
    return built_wheel


def test_the_wheel_is_for_one_platform_and_every_python_3(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"fxpar-{fxpar.__version__}-py3-none-{platform}.whl"
    with ZipFile(wheel) as files:
        about = HeaderParser().parsestr(files.read(f"fxpar-{fxpar.__version__}.dist-info/WHEEL").decode())
    assert about["Tag"] == f"py3-none-{platform}"
    assert about["Root-Is-Purelib"] == "false"


def test_the_native_core_needs_nothing_of_python(wheel: Path, tmp_path: Path) -> None:
    with ZipFile(wheel) as files:
        library = files.extract("fxpar/libfxpar.so", tmp_path)
    undefined = _run(["nm", "-D", "--undefined-only", library], tmp_path)
    assert "memcpy" in undefined, "the symbols that it takes from other libraries"
    assert not [line for line in undefined.splitlines() if line.split()[-1].startswith(("Py", "_Py"))]


def test_the_wheel_has_all_that_the_checkout_has(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        packaged = {name for name in files.namelist() if name.startswith("fxpar/")}
    linked = {f"fxpar/{path.relative_to(ROOT)}" for name in ("lowering", "examples") for path in _code(ROOT / name)}
    own = {str(path.relative_to(ROOT)) for path in _code(ROOT / "fxpar")}
    assert packaged - {"fxpar/libfxpar.so"} == own | linked
    assert {"fxpar/py.typed", "fxpar/hardware/clusters/laptop.json", "fxpar/examples/train_gpt.py"} <= packaged


def test_the_demo_runs_from_the_wheel_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    environment, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    site = _install(wheel, environment)
    python = environment / "bin" / "python"
    where = _run([str(python), "-c", "import fxpar; print(fxpar.__file__)"], elsewhere).strip()
    assert Path(where) == site / "fxpar" / "__init__.py"

    said = _run([str(environment / "bin" / "fxpar"), "demo", *DEMO], elsewhere)
    assert said.startswith("2 processes train a small GPT for 2 steps"), said
    report = json.loads((elsewhere / "dump" / "demo.json").read_text())
    assert len(report["losses"]) == 2 and report["max_loss_diff"] < 1e-4
    assert "dump/demo.json has the losses" in said and "xdg-open dump/report.html" in said
    assert (elsewhere / "dump" / "report.html").is_file()
    graph = said.split("less ")[1].split()[0]
    assert "blocks.0.mlp.fc" in (elsewhere / graph).read_text()


def _install(wheel: Path, environment: Path) -> Path:
    """A virtual environment with the wheel, and the dependencies of this one; returns its folder of packages."""
    venv.create(environment, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    _run([*pip, "install", "--no-deps", "--no-index", str(wheel)], environment)
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read
    return site


def _code(folder: Path) -> list[Path]:
    """The files that are to be packaged; symbolic links are not followed."""
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".json", ".typed", ".html", ".css", ".js")]
    return [path for path in files if path.is_file() and not path.is_symlink()]


def _run(command: list[str], folder: Path) -> str:
    """What a command prints; it sees neither the checkout nor a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
