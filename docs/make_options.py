"""Write docs/options.md from the signatures and docstrings of the source: `python docs/make_options.py`."""

from __future__ import annotations

import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fxpar import distribute, environment, init_mesh
from fxpar.config import Options

PAGE = Path(__file__).with_name("options.md")

INTRODUCTION = """\
# Options

All parameters of `fxpar.init_mesh` and `fxpar.distribute`, all options of the backend of `torch.compile`, and all
environment variables that fxpar reads. `python docs/make_options.py` makes this page from the docstrings and signatures
in the source: change it there.
"""

REQUIRED = inspect.Parameter.empty
"""In the place of a default: there is none."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(options_page(), encoding="utf-8")


def options_page() -> str:
    """The page, in Markdown."""
    return "\n".join(
        (
            INTRODUCTION,
            function_section("fxpar.init_mesh", init_mesh),
            function_section("fxpar.distribute", distribute),
            options_section(),
            environment_section(),
        )
    )


def function_section(title: str, function: Callable[..., Any]) -> str:
    """A function: what it does, and its parameters."""
    introduction, arguments = inspect.cleandoc(function.__doc__ or "").split("Args:\n")
    block = arguments.split("\nRaises:\n")[0]
    defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    return section(title, introduction, rows(function, defaults, entries(textwrap.dedent(block))))


def options_section() -> str:
    """The options of `torch.compile`."""
    text = inspect.cleandoc(Options.__doc__ or "")
    defaults = {each.name: REQUIRED if each.default is MISSING else each.default for each in fields(Options)}
    introduction = text[: text.index(f"\n{next(iter(defaults))}: ")]
    return section("torch.compile", introduction, rows(Options, defaults, entries(text)))


def environment_section() -> str:
    """The environment variables: the docstring of each function begins with the name of the one that it reads."""
    lines = [row("name", "default", "what it does"), row(*["---"] * 3)]
    for reader in filter(inspect.isfunction, vars(environment).values()):
        name, colon, text = " ".join((reader.__doc__ or "").split()).partition(": ")
        assert colon and name.isupper(), f"the docstring of {reader.__name__} must be `VARIABLE: what it does`"
        lines.append(row(code(name), "unset", sentence(text)))
    return section("Environment variables", "", lines)


def section(title: str, introduction: str, table: Iterable[str]) -> str:
    """A heading, a text and a table, with an empty line between each two."""
    parts = (f"## {title}", introduction.strip(), "\n".join(table))
    return "\n\n".join(part for part in parts if part) + "\n"


def entries(text: str) -> dict[str, str]:
    """The entries `name: text` at the margin, each with its indented lines."""
    found = re.findall(r"^(\w+): (.*(?:\n +.*)*)", text, re.MULTILINE)
    return {name: " ".join(lines.split()) for name, lines in found}


def rows(owner: Any, defaults: Mapping[str, Any], described: Mapping[str, str]) -> list[str]:
    """A table of the parameters of a function, or the fields of a class, in the order of `defaults`."""
    missing, unknown = defaults.keys() - described.keys(), described.keys() - defaults.keys()
    assert not missing and not unknown, f"the docstring of {owner.__name__} lacks {missing}, and has {unknown} besides"
    types = get_type_hints(owner)
    cells = [
        (code(name), code(type_text(types[name])), default_text(default), sentence(described[name]))
        for name, default in defaults.items()
    ]
    return [row("name", "type", "default", "what it does"), row(*["---"] * 4), *(row(*each) for each in cells)]


def row(*cells: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def type_text(given: Any) -> str:
    """A type as one writes it, without modules, and with what aliases stand for."""
    origin, parts = get_origin(given), get_args(given)
    if isinstance(given, list):
        return f"[{', '.join(map(type_text, given))}]"
    if origin is Literal:
        return " | ".join(map(json.dumps, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, parts))
    if given in (None, NoneType):
        return "None"
    name: str = (origin or given).__name__
    return f"{name}[{', '.join(map(type_text, parts))}]" if parts else name


def default_text(default: Any) -> str:
    """A default as one writes it in Python."""
    if default is REQUIRED:
        return "required"
    if isinstance(default, str):
        return code(json.dumps(default))
    return code("math.inf" if default == math.inf else repr(default))


def code(text: str) -> str:
    """`text` as code."""
    return f"`{text}`"


def sentence(text: str) -> str:
    """`text` with a capital, and with its quoted values as code."""
    quoted = re.sub(r"`[^`]*`|\"[^\"\s]+\"", lambda found: code(found[0].strip("`")), text)
    return quoted[:1].upper() + quoted[1:]


if __name__ == "__main__":
    main()
