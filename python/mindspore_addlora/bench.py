"""Measures the CPU kernels and the machine's two ceilings, and prints how near they come to each other.

The limit of a call is the longer of two times: its multiply-adds at the machine's peak, and its bytes at the rate at
which as many bytes are read again and again. Where other processes use the CPU, nothing is reported.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from . import _core, raw

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
POPULARITIES = ("one", "uniform", "skewed", "different")
# How much of one core others may use.
MOST_BUSY = 0.1
# Far more than any last-level cache keeps for one process.
STREAMED_BYTES = 1 << 30

Array = npt.NDArray[Any]


class BusyMachineError(RuntimeError):
    """Other processes use the CPU: a measurement would be of them."""


class OtherWork:
    """The CPU time that others use from now on, in cores."""

    def __init__(self) -> None:
        self._begin = self._times()

    @staticmethod
    def _times() -> tuple[float, float, float]:
        # user, nice, system, idle, iowait, irq, softirq, steal: guests count as users already
        ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        idle = int(ticks[3]) + int(ticks[4])
        busy = (sum(map(int, ticks)) - idle) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return (
            time.monotonic(),
            busy,
            own.user + own.system + own.children_user + own.children_system,
        )

    def cores(self) -> float:
        wall, busy, own = (
            now - begin for now, begin in zip(self._times(), self._begin, strict=True)
        )
        return max(0.0, busy - own) / wall

    def refuse(self) -> None:
        """Raises BusyMachineError where others used more than a little."""
        cores = self.cores()
        if cores > MOST_BUSY:
            raise BusyMachineError(
                f"this machine is busy: other processes use {cores:.2f} cores "
                f"(at most {MOST_BUSY} may be used). Nothing is reported."
            )


def refuse_where_busy(seconds: float = 1.0) -> None:
    """Looks at what others do for a moment."""
    others = OtherWork()
    time.sleep(seconds)
    others.refuse()


@dataclass(frozen=True)
class Case:
    """A call: sizes, and which adapters the rows use."""

    rows: int
    rank: int = 16
    dtype: str = "float16"
    width: int = 4096  # H1, H2 and H3
    adapters: int = 8  # W
    layers: int = 1  # L
    popularity: str = "uniform"

    def indices(self) -> Array:
        """Like those of a server: the rows of a few requests, in no order, or sorted where there are many."""
        rng = np.random.default_rng(0)
        chosen: Array
        if self.popularity == "one":
            chosen = np.zeros(self.rows)
        elif self.popularity == "uniform":
            chosen = np.arange(self.rows) % self.adapters
        elif self.popularity == "skewed":  # Zipf's law
            shares = 1 / np.arange(1, self.adapters + 1)
            chosen = rng.choice(self.adapters, self.rows, p=shares / shares.sum())
        else:
            chosen = np.arange(self.rows) % self.weights
        order = np.sort(chosen) if self.rows >= 128 else rng.permutation(chosen)
        return order.astype(np.int32)

    @property
    def weights(self) -> int:
        """W: as many as there are rows where all of them differ."""
        return max(self.adapters, self.rows) if self.popularity == "different" else self.adapters

    @property
    def item(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def bytes(self) -> int:
        """What must be read: the adapters in use once, x and y."""
        used = len(np.unique(self.indices()))
        return 2 * self.width * self.item * (self.rows + used * self.rank)

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.rank * self.width

    def arguments(self) -> dict[str, Any]:
        """The arguments of `raw.add_lora`."""
        rng = np.random.default_rng(1)
        dtype = DTYPES[self.dtype]

        def values(*shape: int) -> Array:
            # A bank may be large: a small block of it is drawn, and repeated.
            block = rng.standard_normal(min(int(np.prod(shape)), 1 << 20), np.float32) / 8
            return np.resize(block.astype(dtype), shape)

        n = self
        return {
            "y": values(n.rows, n.width),
            "x": values(n.rows, n.width),
            "weight_b": values(n.weights, n.layers, n.width, n.rank),
            "indices": self.indices(),
            "weight_a": values(n.weights, n.layers, n.rank, n.width),
            "scale": 0.5,
            "out": np.zeros((n.rows, n.width), dtype),
            "limits": "none",
        }

    def call(self) -> Callable[[], Any]:
        """The call on warm arrays; with more than one layer each run takes the next one."""
        arguments = self.arguments()
        if self.layers == 1:
            return lambda: raw.add_lora(**arguments)
        turn = -1

        def next_layer() -> Any:
            nonlocal turn
            turn = (turn + 1) % self.layers
            return raw.add_lora(**arguments, layer_idx=turn)

        return next_layer


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    minimum: float
    median: float


def in_turn(
    calls: dict[str, Callable[[], Any]], seconds: float = 0.5, rounds: int = 2000
) -> dict[str, Timing]:
    """Times the calls one after the other, again and again, so that all see the same machine.

    Each turn of a call is a few runs: the first one is not counted, because the call before it left its own data in
    the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    begin = time.perf_counter()
    while len(next(iter(times.values()))) < rounds:
        for name, call in calls.items():
            call()
            for _ in range(4):
                start = time.perf_counter_ns()
                call()
                times[name].append((time.perf_counter_ns() - start) / 1e3)
        if time.perf_counter() - begin > seconds * len(calls):
            break
    return {name: Timing(min(taken), median(taken)) for name, taken in times.items()}


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do, with the threads of a call."""

    flops: float
    memory: float  # bytes a second

    @staticmethod
    def measured() -> Ceilings:
        return Ceilings(_core.measure_flops(), read_rate(STREAMED_BYTES))


def read_rate(size: int) -> float:
    """Bytes a second at which as many bytes are read over and over: from the caches where they fit."""
    size = max(size, 1 << 20)
    return float(_core.measure_read(np.ones(size // 4, np.float32)))


def limit(case: Case, ceilings: Ceilings, bandwidth: float) -> float:
    """The least microseconds that the machine could need."""
    return 1e6 * max(case.flops / ceilings.flops, case.bytes / bandwidth)


def machine() -> str:
    """The CPU, the kernel set and the threads."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    return f"{name}, {raw.backends()['cpu'].detail}, {raw.get_num_threads()} threads"


def measure(cases: Sequence[Case], ceilings: Ceilings, seconds: float) -> list[dict[str, Any]]:
    """One record for each case."""
    records = []
    for case in cases:
        timing = in_turn({"ours": case.call()}, seconds)["ours"]
        streamed = case.layers > 1
        bandwidth = ceilings.memory if streamed else read_rate(case.bytes)
        records.append(
            asdict(case)
            | {
                "streamed": streamed,
                "minimum": timing.minimum,
                "median": timing.median,
                "limit": limit(case, ceilings, bandwidth),
            }
        )
    return records


def measure_gradients(seconds: float) -> dict[str, Timing]:
    """The forward call and each gradient, in turn: 1024 rows in 8 segments, rank 16, width 4096, float16."""
    case = Case(1024)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return (rng.standard_normal(shape) / 8).astype(np.float16)

    rows, width, rank, adapters = case.rows, case.width, case.rank, case.adapters
    y, x, indices = draw(rows, width), draw(rows, width), case.indices()
    a, b = draw(adapters, 1, rank, width), draw(adapters, 1, width, rank)
    out = np.empty_like(y)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: raw.add_lora(y, x, b, indices, a, out=out)
    }
    for wanted, like in (("x", x), ("weight_a", a), ("weight_b", b)):
        result = np.empty_like(like)
        calls[f"gradient of {wanted}"] = functools.partial(
            _core.gradient, wanted, y, x, b, indices, a, 0, 1.0, 0, result
        )
    return in_turn(calls, seconds)


def standard_cases() -> list[Case]:
    """The table of this command."""
    cases = [Case(rows, dtype=dtype) for dtype in DTYPES for rows in (8, 32, 1024)]
    cases.append(Case(1024, rank=64))
    layers = STREAMED_BYTES // Case(8).bytes
    cases += [Case(8, layers=layers), Case(8, adapters=2), Case(8, adapters=32, layers=1)]
    cases.append(Case(1, width=1024, adapters=1))
    return cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case (0.5)")
    parser.add_argument("--threads", type=int, help="threads of a call (as the environment says)")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument(
        "--busy", action="store_true", help="report even where other processes use the CPU"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints the table."""
    if arguments.threads is not None:
        raw.set_num_threads(arguments.threads)
    try:
        if not arguments.busy:
            refuse_where_busy()
        others = OtherWork()
        ceilings = Ceilings.measured()
        records = measure(standard_cases(), ceilings, arguments.seconds)
        gradients = measure_gradients(arguments.seconds)
        if not arguments.busy:
            others.refuse()
    except BusyMachineError as busy:
        print(busy, file=sys.stderr)
        return 1
    print(machine())
    print(
        f"ceilings: {ceilings.flops / 1e9:.0f} GFLOP/s of multiply-adds, "
        f"{ceilings.memory / 1e9:.1f} GB/s read from memory"
    )
    print("rows  rank  width   W  dtype     weights   minimum    median      limit  fraction")
    for r in records:
        weights = "streamed" if r["streamed"] else "warm"
        print(
            f"{r['rows']:4d}  {r['rank']:4d}  {r['width']:5d}  {r['adapters']:2d}  {r['dtype']:8s}  {weights:8s}  "
            f"{r['minimum']:6.1f} us {r['median']:6.1f} us {r['limit']:7.1f} us  {r['limit'] / r['median']:7.0%}"
        )
    print("\ntraining: 1024 rows, rank 16, width 4096, float16")
    for name, timing in gradients.items():
        print(f"{name:20s}  {timing.minimum:6.1f} us {timing.median:6.1f} us")
    forward = gradients["forward"].median
    backward = sum(timing.median for timing in gradients.values()) - forward
    print(f"backward / forward    {backward / forward:.2f}")
    if arguments.json is not None:
        result = {
            "machine": machine(),
            "ceilings": asdict(ceilings),
            "cases": records,
            "training": {name: asdict(timing) for name, timing in gradients.items()},
        }
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0
