"""Benchmarks: each one listed here has a function `fxpar.bench.NAME.run.run`, which returns a `Report`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What the command line shows of a benchmark, without importing it."""

    measures: str
    modes: Mapping[str, str] = field(default_factory=dict)
    """Name -> what it does. The flag --NAME calls `run(say, mode=NAME)`; without a flag it is `run(say)`."""


BENCHMARKS = {
    "step": Benchmark(
        "choosing layouts, compiling, executor overhead, and step time against torch.distributed.pipelining; 12 minutes"
    ),
    "compile": Benchmark(
        "from launch to second step and first evaluation, with cold and warm caches, against torch.compile; 7 minutes",
        {
            "scale": "how planning and the passes grow with layers, stages, microbatches and up to 8,192 ranks that do "
            "not exist; some 3 minutes",
        },
    ),
    "reshard": Benchmark(
        "moving tensors between meshes by all strategies, on the ranks that torchrun started or four of this machine",
        {
            "simulate": "only plan the cases of the paper, and time plans of many tasks",
            "emulate": "run the cases of the paper on emulated hosts with links of 200 Mbit/s; some 7 minutes, as root",
        },
    ),
    "overlap": Benchmark(
        "steps with collectives beside computation, one rule after another, against DDP and FSDP2 at their best",
        {"emulate": "on emulated hosts whose links communicate as long as is computed; some 10 minutes, as root"},
    ),
    "fused": Benchmark(
        "matmuls fused with the collective beside them, against the best matmul alone, on four ranks of this machine",
        {"emulate": "on emulated hosts whose links communicate as long as is computed; some 20 minutes, as root"},
    ),
    "gpu": Benchmark(
        "a training step on one GPU, in time and memory, against torch.compile of the same model; two minutes"
    ),
    "planner": Benchmark(
        "how well predicted step times rank the meshes of eight ranks that sleep where they would compute",
        {"emulate": "on four emulated hosts, as always; some 15 minutes, as root"},
    ),
    "explain": Benchmark(
        "whether the first change that `fxpar explain` proposes for ten bad and middling setups makes a step faster",
        {"emulate": "on four emulated hosts whose ranks sleep where they would compute, as always; as root"},
    ),
    "pipeline": Benchmark(
        "schedules of real models on ranks of this machine, against torch.distributed.pipelining",
        {"emulate": "on emulated hosts whose links communicate as long as is hard to hide; some 25 minutes, as root"},
    ),
}
"""Benchmarks by name."""
