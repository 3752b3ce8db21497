"""The program that is launched: it trains the example GPT for two steps, evaluates it, and prints when it did what.

python -m fxpar.bench.compile.program --layers 12
python -m torch.distributed.run --nproc-per-node 4 -m fxpar.bench.compile.program --pipe 2 --x 2
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

BATCH, MICROBATCHES = 4, 2
"""So few sequences that the steps themselves take tenths of a second: what is measured is how they come about."""


def main() -> None:
    """Print one JSON object: seconds since the epoch at the end of each phase, and bytes of memory; by rank 0."""
    options = parse_options()
    ends: dict[str, float] = {}

    def note(phase: str) -> None:
        ends[phase] = time.time()

    import torch

    torch.set_num_threads(1)  # ranks share the machine's cores
    note("import_torch")
    run_steps(options, note)
    if os.environ.get("RANK", "0") == "0":
        from fxpar.hardware.machine import peak_process_bytes

        print(json.dumps({"ends": ends, "peak_bytes": peak_process_bytes()}))


def run_steps(options: argparse.Namespace, note: Callable[[str], None]) -> None:
    """Two steps and an evaluation: on a mesh, if one is given, otherwise by `torch.compile` in one process."""
    import torch

    from fxpar.bench.models import example

    gpt = example("gpt")
    torch.manual_seed(0)
    config = gpt.Config(layers=options.layers, hidden=256)
    model = gpt.GPT(config)
    tokens = torch.randint(config.vocabulary, (BATCH, config.context + 1))
    batch = [tokens[:, :-1], tokens[:, 1:]]
    if options.pipe * options.x > 1:
        import fxpar

        mesh = fxpar.init_mesh(pipe=options.pipe, x=options.x)
        note("init_mesh")
        hints = example("train_gpt").HINTS
        fxpar.distribute(model, mesh, layouts=hints, microbatches=MICROBATCHES, example_inputs=batch)
        note("distribute")
        step: Callable[..., Any] = torch.compile(model, backend="fxpar")
    else:
        batch = [tensor[: BATCH // MICROBATCHES] for tensor in batch]
        step = torch.compile(model)
    for phase in ("first_step", "second_step"):
        step(*batch).backward()
        note(phase)
    with torch.no_grad():
        step(*batch)
    note("evaluation")


def parse_options() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pipe", type=int, default=1)
    parser.add_argument("--x", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
