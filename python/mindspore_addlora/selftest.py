"""The first thing to run on new hardware: a backend against the float64 formula, and what CANN's operator does.

With ``--backend aclnn`` the NPU is compared with this CPU's ``rounding="device"``, and each quirk of the operator that
this project guards against is tried. Send the table back with a report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from . import _core, raw

Array = npt.NDArray[Any]


class Line(NamedTuple):
    """One line of the table."""

    name: str
    expected: str
    seen: str
    ok: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--backend", choices=("cpu", "aclnn"), default="cpu")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table. 0 where everything is as expected, 1 where something is not, 2 where nothing can be run."""
    info = raw.backends()[arguments.backend]
    if not info.available:
        print(
            f"backend {arguments.backend} is not available here: {info.reason}",
            file=sys.stderr,
        )
        return 2
    print(f"mindspore_addlora {_core.__version__}, backend {arguments.backend}: {info.detail}\n")
    checks = CPU_CHECKS if arguments.backend == "cpu" else NPU_CHECKS
    lines = [line for check in checks for line in _guarded(check.__name__, check())]
    print_table(lines)
    differing = [line.name for line in lines if not line.ok]
    print(
        f"\n{len(lines)} checks, "
        + ("all as expected" if not differing else f"not as expected: {', '.join(differing)}")
    )
    return 1 if differing else 0


def print_table(lines: list[Line]) -> None:
    """The lines in columns."""
    rows = [("", "check", "expected", "seen")]
    rows += [
        ("ok" if line.ok else "DIFFERS", line.name, line.expected, line.seen) for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            + "  "
            + row[3]
        )


def _guarded(name: str, lines: Iterator[Line]) -> Iterator[Line]:
    """The lines of a check; a failure is one of them, and ends that check only."""
    try:
        yield from lines
    except (raw.AclError, raw.AddLoraError) as error:
        yield Line(name, "an answer", f"{type(error).__name__}: {error}", False)


def _problem(
    dtype: npt.DTypeLike = np.float16,
    *,
    rows: int = 37,
    h1: int = 1024,
    h2: int = 256,
    h3: int = 320,
    rank: int = 16,
    adapters: int = 5,
    layers: int = 2,
    with_a: bool = True,
) -> dict[str, Any]:
    """Rows of every adapter, of -1 and of W, apart from each other."""
    random = np.random.default_rng(20)

    def draw(*shape: int) -> Array:
        values: Array = random.standard_normal(shape) / np.sqrt(shape[-1])
        return values.astype(dtype)

    return {
        "y": draw(rows, h3) * np.asarray(8, dtype),
        "x": draw(rows, h1 if with_a else rank) * np.asarray(16, dtype),
        "weight_b": draw(adapters, layers, h2, rank),
        "indices": (np.arange(rows) * 3 % (adapters + 2) - 1).astype(np.int32),
        "weight_a": draw(adapters, layers, rank, h1) if with_a else None,
    }


_SCALARS: dict[str, Any] = {"layer_idx": 1, "scale": 0.5, "y_offset": 48}


def _formula(
    p: dict[str, Any], *, layer_idx: int, scale: float, y_offset: int
) -> npt.NDArray[np.float64]:
    out: npt.NDArray[np.float64] = p["y"].astype(np.float64)
    adapters, _, h2, _ = p["weight_b"].shape
    for row, index in enumerate(p["indices"]):
        if not 0 <= index < adapters:
            continue
        z = p["x"][row].astype(np.float64)
        if p["weight_a"] is not None:
            z = p["weight_a"][index, layer_idx].astype(np.float64) @ z
        out[row, y_offset : y_offset + h2] += scale * (
            p["weight_b"][index, layer_idx].astype(np.float64) @ z
        )
    return out


def _base_rows(p: dict[str, Any]) -> npt.NDArray[np.bool_]:
    none: npt.NDArray[np.bool_] = (p["indices"] < 0) | (p["indices"] >= p["weight_b"].shape[0])
    return none


def _against_the_formula() -> Iterator[Line]:
    for name, dtype, epsilon in (
        ("float16", np.float16, 2**-11),
        ("bfloat16", ml_dtypes.bfloat16, 2**-8),
        ("float32", np.float32, 2**-18),
    ):
        p = _problem(dtype)
        exact = _formula(p, **_SCALARS)
        out = raw.add_lora(**p, **_SCALARS)
        error = (np.abs(out.astype(np.float64) - exact) / (1 + np.abs(exact))).max()
        yield Line(
            f"{name} against float64",
            f"at most {epsilon:.1e}",
            f"{error:.1e}",
            bool(error <= epsilon),
        )
        none = _base_rows(p)
        same = out[none].tobytes() == p["y"][none].tobytes()
        yield Line(
            f"{name} base rows", "the bits of y", "the bits of y" if same else "other bits", same
        )


def _threads() -> Iterator[Line]:
    p = _problem(rows=200)
    before = raw.get_num_threads()
    try:
        results = []
        for n in (1, 2, 7):
            raw.set_num_threads(n)
            results.append(raw.add_lora(**p, **_SCALARS).tobytes())
    finally:
        raw.set_num_threads(before)
    same = len(set(results)) == 1
    yield Line(
        "1, 2 and 7 threads", "the same bits", "the same bits" if same else "other bits", same
    )


def _near_the_cpu(out: Array, p: dict[str, Any], **scalars: Any) -> tuple[str, bool]:
    """float32 sums in another order may fall to the other side of a rounding boundary, seldom."""
    predicted = raw.add_lora(**p, **scalars, limits="none", rounding="device")
    equal = float(np.mean(out.view(np.uint16) == predicted.view(np.uint16)))
    reach = 2**-9 * (1 + np.abs(predicted.astype(np.float64)))
    error = np.abs(out.astype(np.float64) - predicted.astype(np.float64))
    worst = float((error / reach).max())
    return f"{100 * equal:.2f}% equal, worst {worst:.2f} of the reach", equal > 0.9 and worst <= 1


def _results() -> Iterator[Line]:
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("a mixed batch", _problem(), _SCALARS),
        ("without weight_a", _problem(with_a=False), _SCALARS),
        ("rank 128, 32 adapters", _problem(rank=128, adapters=32), _SCALARS),
        ("32 layers", _problem(layers=32), _SCALARS | {"layer_idx": 31}),
        ("one row", _problem(rows=1) | {"indices": np.array([3], np.int32)}, _SCALARS),
        ("1000 rows", _problem(rows=1000), _SCALARS),
        ("H1 = 11008", _problem(h1=11008), _SCALARS),
    ]
    for name, p, scalars in cases:
        yield from _guarded(name, _result(name, p, scalars))


def _result(name: str, p: dict[str, Any], scalars: dict[str, Any]) -> Iterator[Line]:
    out = raw.add_lora(**p, **scalars, backend="aclnn")
    seen, ok = _near_the_cpu(out, p, **scalars)
    yield Line(name, "the CPU's with rounding=device", seen, ok)
    none = _base_rows(p)
    if none.any():
        same = out[none].tobytes() == p["y"][none].tobytes()
        yield Line(
            f"{name}: base rows",
            "the bits of y",
            "the bits of y" if same else "other bits",
            same,
        )


class _Probe:
    """CANN's operator as it is, with separate y and out."""

    def __init__(self, p: dict[str, Any], y_slice_size: int, **scalars: Any) -> None:
        scalars = _SCALARS | scalars
        self.out_before = np.full_like(p["y"], 7)
        self.y, self.out = p["y"].copy(), self.out_before.copy()
        self.first_phase, self.second_phase, self.workspace = _core.probe(
            self.y,
            p["x"],
            p["weight_b"],
            p["indices"],
            p["weight_a"],
            scalars["layer_idx"],
            scalars["scale"],
            scalars["y_offset"],
            y_slice_size,
            self.out,
        )

    @property
    def codes(self) -> str:
        return f"codes {self.first_phase} and {self.second_phase}"

    @property
    def ran(self) -> bool:
        return bool(self.first_phase == 0 and self.second_phase == 0)


def _where_the_result_is() -> Iterator[Line]:
    p = _problem()
    probe = _Probe(p, p["weight_b"].shape[2])
    yield Line("the call as we make it", "codes 0 and 0", probe.codes, probe.ran)
    untouched = probe.out.tobytes() == probe.out_before.tobytes()
    yield Line("out", "not written", "not written" if untouched else "written", untouched)
    seen, ok = _near_the_cpu(probe.y, p, **_SCALARS)
    yield Line("y", "added into", seen, ok)
    (rows, h1), (h2, rank) = p["x"].shape, p["weight_b"].shape[2:]
    whole = (rows + 15) // 16 * 16
    size = 16777216 + rows * h1 * 2 + whole * rank * 2 + whole * h2 * 2 + whole * 12 + 1048576
    yield Line("workspace bytes", f"{size}", f"{probe.workspace}", probe.workspace == size)


def _rows_without_an_adapter() -> Iterator[Line]:
    for name, index in (("index -1", -1), ("index W", 5)):
        p = _problem()
        p["indices"][:] = index
        probe = _Probe(p, p["weight_b"].shape[2])
        same = probe.y.tobytes() == p["y"].tobytes()
        seen = ("skipped" if same else "y changed") if probe.ran else f"not run, {probe.codes}"
        yield Line(name, "the row is skipped", seen, probe.ran and same)


def _scale() -> Iterator[Line]:
    p = _problem()
    for scale in (1.0, 0.5, 2.0**-20, -3.0):
        probe = _Probe(p, p["weight_b"].shape[2], scale=scale)
        seen, ok = _near_the_cpu(probe.y, p, **(_SCALARS | {"scale": scale}))
        yield Line(f"scale {scale:g}", "passed as a double", seen, ok)
    p["y"][:] = 0
    probe = _Probe(p, p["weight_b"].shape[2], scale=1e6)
    finite = bool(np.isfinite(probe.y[~_base_rows(p), 48:304]).any())
    yield Line(
        "scale 1e6", "infinite in float16", "finite" if finite else "infinite or NaN", not finite
    )


def _slice_size() -> Iterator[Line]:
    p = _problem()
    probe = _Probe(p, -1)
    if probe.first_phase != 0:
        # CANN before 9.1.0 refuses it; we never pass it.
        yield Line(
            "y_slice_size -1", "means H2, or refused", f"refused with {probe.first_phase}", True
        )
    else:
        seen, ok = _near_the_cpu(probe.y, p, **_SCALARS)
        yield Line("y_slice_size -1", "means H2, or refused", f"means H2: {seen}", ok)
    probe = _Probe(p, 16)
    if probe.first_phase != 0:
        yield Line(
            "y_slice_size 16",
            "all H2 columns, or refused",
            f"refused with {probe.first_phase}",
            True,
        )
    else:
        seen, ok = _near_the_cpu(probe.y, p, **_SCALARS)
        yield Line("y_slice_size 16", "all H2 columns, or refused", f"all H2 columns: {seen}", ok)


CPU_CHECKS = (_against_the_formula, _threads)
NPU_CHECKS = (_results, _where_the_result_is, _rows_without_an_adapter, _scale, _slice_size)
