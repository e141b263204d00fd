"""Inputs made by integer operations alone, and a digest of a result: tests/cpp/recipe.hpp in numpy.

``tests/data/digests.json`` holds the cases and the digest of each. Run as a script, this file writes
it anew (for a new case; the digest of an old one must never change).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from reference import DTYPES, Array, Problem, bits

FILE = Path(__file__).resolve().parent / "data" / "digests.json"
NORMAL, SUBNORMAL, ANY_BASE_ROWS = range(3)
Y, X, B, INDICES, A = range(5)
Words = npt.NDArray[np.uint64]


class Case(NamedTuple):
    """One call; h1 = 0 is one without weight_a."""

    dtype: str
    rounding: str
    b: int
    h1: int
    h2: int
    h3: int
    r: int
    w: int
    l: int
    layer_idx: int
    y_offset: int
    scale_quarters: int
    seed: int
    kind: int
    digest: str = ""


FIELDS = list(Case._fields)


class Format(NamedTuple):
    """Where the parts of a number lie in its bits."""

    mantissa: int
    exponent_bias: int
    sign_bit: int
    word: Any


FORMATS = {
    "float16": Format(10, 15, 15, np.uint16),
    "bfloat16": Format(7, 127, 15, np.uint16),
    "float32": Format(23, 127, 31, np.uint32),
}


def word(value: int) -> np.uint64:
    return np.uint64(value & (2**64 - 1))


def mix(x: Words) -> Words:
    """splitmix64: every bit of the result depends on every bit of x."""
    with np.errstate(over="ignore"):
        x = x + word(0x9E3779B97F4A7C15)
        x = (x ^ x >> word(30)) * word(0xBF58476D1CE4E5B9)
        x = (x ^ x >> word(27)) * word(0x94D049BB133111EB)
    return x ^ x >> word(31)


def random(case: Case, tensor: int, count: int) -> Words:
    first = mix(np.array([case.seed * 16 + tensor], np.uint64))
    with np.errstate(over="ignore"):
        return mix(first + np.arange(count, dtype=np.uint64))


def elements(case: Case, tensor: int, *shape: int) -> Array:
    """Magnitudes within six powers of two, and a zero in 16."""
    form = FORMATS[case.dtype]
    h = random(case, tensor, int(np.prod(shape)))
    exponent = word(form.exponent_bias - (8 if tensor in (A, B) else 4)) + (h >> word(40)) % word(6)
    fraction = h & word(2**form.mantissa - 1)
    if case.kind == SUBNORMAL and tensor in (Y, B):
        exponent[:] = 0
    zero = (h >> word(32)) % word(16) == 0
    exponent[zero] = fraction[zero] = 0
    number = h >> word(63) << word(form.sign_bit) | exponent << word(form.mantissa) | fraction
    return number.astype(form.word).view(DTYPES[case.dtype]).reshape(shape)


def problem_of(case: Case) -> Problem:
    """The arguments of ``raw.add_lora``, without the rounding."""
    indices = (random(case, INDICES, case.b) % word(case.w + 3)).astype(np.int32) - 2
    y = elements(case, Y, case.b, case.h3)
    if case.kind == ANY_BASE_ROWS:
        base = (indices < 0) | (indices >= case.w)
        anything = random(case, Y, y.size).astype(FORMATS[case.dtype].word).reshape(y.shape)
        y[base] = anything.view(y.dtype)[base]
    with_a = case.h1 > 0
    return {
        "y": y,
        "x": elements(case, X, case.b, case.h1 if with_a else case.r),
        "weight_b": elements(case, B, case.w, case.l, case.h2, case.r),
        "indices": indices.astype(np.int32),
        "weight_a": elements(case, A, case.w, case.l, case.r, case.h1) if with_a else None,
        "layer_idx": case.layer_idx,
        "scale": case.scale_quarters / 4,
        "y_offset": case.y_offset,
    }


def digest_of(out: Array) -> str:
    """The order of the elements counts, and each bit of them."""
    numbers = bits(out).astype(np.uint64).ravel()
    with np.errstate(over="ignore"):
        mixed = mix(mix(np.arange(numbers.size, dtype=np.uint64)) + numbers)
        return f"{int(mixed.sum(dtype=np.uint64)):016x}"


def cases() -> list[Case]:
    """The cases of the file, with their digests."""
    content = json.loads(FILE.read_text())
    assert content["fields"] == FIELDS
    return [Case(*row) for row in content["cases"]]


def write(digested: list[Case]) -> None:
    """One case a line: CMake reads the file too."""
    rows = ",\n".join(f"  {json.dumps(list(case))}" for case in digested)
    FILE.write_text(f'{{"fields": {json.dumps(FIELDS)},\n "cases": [\n{rows}\n]}}\n')


def chosen() -> list[Case]:
    """Sizes around the lanes, tiles and blocks of the kernels; many rows, few rows, one row."""
    sizes = [
        # b, h1, h2, h3, r, w, l, layer_idx, y_offset, scale_quarters
        (1, 1, 1, 1, 1, 1, 1, 0, 0, 4),
        (5, 15, 17, 33, 3, 2, 1, 0, 16, 3),
        (7, 16, 16, 16, 16, 4, 2, 1, 0, -2),
        (9, 33, 31, 64, 17, 3, 2, 0, 33, 5),
        (33, 64, 48, 50, 8, 5, 1, 0, 1, 1),
        (64, 129, 127, 130, 33, 7, 3, 2, 3, 7),
        (20, 0, 40, 40, 16, 4, 1, 0, 0, 4),
        (13, 0, 255, 300, 65, 4, 2, 1, 45, 9),
        (3, 1040, 520, 520, 150, 3, 1, 0, 0, 2),
        (1, 2048, 1040, 1056, 64, 2, 1, 0, 16, 4),
        (200, 257, 260, 300, 16, 6, 1, 0, 7, 6),
        (40, 513, 70, 70, 130, 2, 1, 0, 0, 4),
    ]
    rows = []
    for dtype in DTYPES:
        for number, size in enumerate(sizes):
            kinds = (NORMAL, SUBNORMAL, ANY_BASE_ROWS) if number in (3, 5, 7) else (NORMAL,)
            for kind in kinds:
                for rounding in ("float32", "device") if dtype == "float16" else ("float32",):
                    rows.append(Case(dtype, rounding, *size, seed=number + 30, kind=kind))
    return rows


if __name__ == "__main__":
    from mindspore_addlora import raw

    def digested(case: Case) -> Case:
        out = raw.add_lora(**problem_of(case), limits="none", rounding=case.rounding)
        return case._replace(digest=digest_of(out))

    write([digested(case) for case in chosen()])
