"""The oracle: the operator in float64, written to be read, and how far from it a result may lie.

A problem is a dict of the arguments of ``raw.add_lora``: ``raw.add_lora(**problem)``,
``add_lora_reference(**problem)``, ``error_bound(**problem)`` and ``device_reference(**problem)``
all take it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Problem = dict[str, Any]

DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
INDEX_PATTERNS = ("none", "one", "repeated_apart", "w", "negative", "mixed", "base_first", "sorted")

# The relative error of one float32 operation: half an ulp.
UNIT = 2.0**-24
# The absolute error of one whose result is subnormal: half of the smallest subnormal.
TINY = 2.0**-150


# ---- problems ----------------------------------------------------------------------------------


def index_pattern(name: str, rng: np.random.Generator, b: int, w: int) -> Array:
    """Indices of b rows for w adapters."""
    patterns = {
        "none": lambda: np.full(b, -1),
        "one": lambda: np.full(b, w // 2),
        "repeated_apart": lambda: np.arange(b) % w,
        "w": lambda: np.full(b, w),
        "negative": lambda: rng.choice([-1, -2, -w, -w - 1, np.iinfo(np.int32).min], b),
        "mixed": lambda: rng.integers(-2, w + 1, b),
        "base_first": lambda: np.concatenate([[-1], rng.integers(0, w, max(b - 1, 0))])[:b],
        "sorted": lambda: np.sort(rng.integers(-1, w + 1, b)),
    }
    return patterns[name]().astype(np.int32)


def make_problem(
    rng: np.random.Generator,
    *,
    b: int = 6,
    h1: int = 32,
    h2: int = 16,
    h3: int = 48,
    r: int = 16,
    w: int = 4,
    l: int = 2,
    dtype: Any = np.float16,
    with_a: bool = True,
    indices: str | Array = "mixed",
    layer_idx: int = 1,
    scale: float = 0.75,
    y_offset: int = 16,
) -> Problem:
    """Normal values, the weights scaled so that the products are as large as y."""

    def draw(*shape: int, size: float = 1.0) -> Array:
        return (size * rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

    return {
        "y": draw(b, h3),
        "x": draw(b, h1 if with_a else r),
        "weight_b": draw(w, l, h2, r, size=r**-0.5),
        "indices": index_pattern(indices, rng, b, w) if isinstance(indices, str) else indices,
        "weight_a": draw(w, l, r, h1, size=h1**-0.5) if with_a else None,
        "layer_idx": layer_idx,
        "scale": scale,
        "y_offset": y_offset,
    }


def make_exact_problem(rng: np.random.Generator, **sizes: Any) -> Problem:
    """Small integers and a power of two for scale: every sum is exact, in whatever order."""
    problem = make_problem(rng, **({"scale": 0.5} | sizes))
    for name in ("y", "x", "weight_b", "weight_a"):
        array = problem[name]
        if array is not None:
            problem[name] = rng.integers(-2, 3, array.shape).astype(array.dtype)
    return problem


# ---- the oracle --------------------------------------------------------------------------------


def active_rows(indices: Array, w: int) -> list[int]:
    """The rows that have an adapter: an index in [0, W)."""
    return [i for i, index in enumerate(indices) if 0 <= index < w]


def written_elements(y: Array, weight_b: Array, indices: Array, y_offset: int, **_: Any) -> Array:
    """Where a result may differ from y: the slice of the rows that have an adapter."""
    w, _, h2, _ = weight_b.shape
    written = np.zeros(y.shape, bool)
    written[active_rows(indices, w), y_offset : y_offset + h2] = True
    return written


def add_lora_reference(
    y: Array,
    x: Array,
    weight_b: Array,
    indices: Array,
    weight_a: Array | None = None,
    *,
    layer_idx: int = 0,
    scale: float = 1.0,
    y_offset: int = 0,
) -> Array:
    """The operator, in float64::

    out = y
    out[i, y_offset : y_offset + H2] += scale * (x[i] @ A[index, layer].T) @ B[index, layer].T
    """
    out = y.astype(np.float64)
    w, _, h2, _ = weight_b.shape
    with np.errstate(all="ignore"):
        for i in active_rows(indices, w):
            z = x[i].astype(np.float64)
            if weight_a is not None:
                z = weight_a[indices[i], layer_idx].astype(np.float64) @ z
            delta = weight_b[indices[i], layer_idx].astype(np.float64) @ z
            out[i, y_offset : y_offset + h2] += scale * delta
    return out


def half_ulp(value: Array, dtype: Any) -> Array:
    """Half the distance between the numbers of dtype around value."""
    info = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(np.abs(value))
    return np.ldexp(0.5, np.maximum(exponent - 1, info.minexp) - info.nmant)


def arithmetic_bound(
    y: Array,
    x: Array,
    weight_b: Array,
    indices: Array,
    weight_a: Array | None = None,
    *,
    layer_idx: int = 0,
    scale: float = 1.0,
    y_offset: int = 0,
) -> Array:
    """How far y + scale * sum in float32 may be from the exact value, before the last rounding.

    The inputs are exact in float32. A sum of n fused multiply-adds is off by at most n * UNIT
    times the sum of the terms' magnitudes. The first product is 16 lanes of ceil(H1 / 16) of them
    and a reduction of 16 values (at most 15 additions), the second R of them, and scale's own
    rounding is one more. So

        gamma * |scale| * (|x| @ |A|.T) @ |B|.T    with gamma = (ceil(H1 / 16) + R + 16) * UNIT

    bounds what the sums contribute. Terms of second order are UNIT times smaller, and hide in the
    additions that a reduction in four steps does not need. Results near zero add TINY for each
    operation, times what multiplies it afterwards.
    """
    bound = np.zeros(y.shape)
    w, _, h2, r = weight_b.shape
    operations = r + 16 + (0 if weight_a is None else -(-x.shape[1] // 16))
    with np.errstate(all="ignore"):
        for i in active_rows(indices, w):
            z = np.abs(x[i].astype(np.float64))
            if weight_a is not None:
                z = np.abs(weight_a[indices[i], layer_idx].astype(np.float64)) @ z
            b = np.abs(weight_b[indices[i], layer_idx].astype(np.float64))
            relative = operations * UNIT * abs(scale) * (b @ z)
            absolute = operations * TINY * (1 + abs(scale) * (1 + b.sum(axis=1)))
            bound[i, y_offset : y_offset + h2] = relative + absolute
    return bound


def error_bound(
    y: Array,
    x: Array,
    weight_b: Array,
    indices: Array,
    weight_a: Array | None = None,
    *,
    layer_idx: int = 0,
    scale: float = 1.0,
    y_offset: int = 0,
) -> Array:
    """How far a result with ``rounding="float32"`` may be from :func:`add_lora_reference`.

    What float32 computes is within E of the exact value: :func:`arithmetic_bound`, and for the
    half-width dtypes the rounding of the last operation to float32, UNIT times the value. Rounding
    that to the dtype moves it by at most half an ulp, taken at the exact value plus E, since the
    computed one may have crossed a power of two. So

        E + half_ulp(|exact| + E)

    and zero where y is kept.
    """
    options = {"layer_idx": layer_idx, "scale": scale, "y_offset": y_offset}
    exact = np.abs(add_lora_reference(y, x, weight_b, indices, weight_a, **options))
    bound = arithmetic_bound(y, x, weight_b, indices, weight_a, **options)
    with np.errstate(all="ignore"):
        if y.dtype != np.float32:
            bound += UNIT * exact
        bound += half_ulp(exact + bound, y.dtype)
    return np.where(written_elements(y, weight_b, indices, y_offset), bound, 0.0)


def device_reference(
    y: Array,
    x: Array,
    weight_b: Array,
    indices: Array,
    weight_a: Array | None = None,
    *,
    layer_idx: int = 0,
    scale: float = 1.0,
    y_offset: int = 0,
    exact_sums: bool = False,
) -> tuple[Array, Array]:
    """The least and the greatest result that ``rounding="device"`` may give; mostly one value.

        Z1 = fp16(x @ A.T);  Z2 = fp16(Z1 @ B.T);  d = fp16(Z2 * fp16(scale));  out = fp16(y + d)

    The sums are float32, so each may lie anywhere within the error of a float32 sum around the
    exact one (see :func:`arithmetic_bound`): (ceil(H1 / 16) + 16) * UNIT * |x| @ |A|.T for the
    first, (R + 16) * UNIT * |Z1| @ |B|.T for the second. Rounding is monotonic, so the rounded
    ends of an interval are the ends of the rounded values. scale goes from double to float to
    half. The last two operations are exact before they are rounded. ``exact_sums=True`` is for
    problems whose float32 sums are exact.
    """
    low, high = y.astype(np.float16), y.astype(np.float16)
    w, _, h2, r = weight_b.shape
    columns = slice(y_offset, y_offset + h2)
    allowance = 0.0 if exact_sums else UNIT
    with np.errstate(all="ignore"):
        factor = np.float64(np.float16(np.float32(scale)))
        for i in active_rows(indices, w):
            z_low = z_high = x[i].astype(np.float64)
            if weight_a is not None:
                a = weight_a[indices[i], layer_idx].astype(np.float64)
                error = allowance * (-(-x.shape[1] // 16) + 16) * (np.abs(a) @ np.abs(z_low))
                z_low, z_high = half(a @ z_low - error), half(a @ z_high + error)
            b = weight_b[indices[i], layer_idx].astype(np.float64)
            error = allowance * (r + 16) * (np.abs(b) @ np.maximum(np.abs(z_low), np.abs(z_high)))
            low_sum = np.where(b < 0, b * z_high, b * z_low).sum(axis=1) - error
            high_sum = np.where(b < 0, b * z_low, b * z_high).sum(axis=1) + error
            ends = [half(half(low_sum) * factor), half(half(high_sum) * factor)]
            base = y[i, columns].astype(np.float64)
            low[i, columns] = half(base + np.minimum(*ends))
            high[i, columns] = half(base + np.maximum(*ends))
    return low, high


def half(value: Any) -> Array:
    """Rounded to float16, as float64. numpy rounds float64 to float16 in one step."""
    return np.asarray(value, np.float64).astype(np.float16).astype(np.float64)


# ---- comparisons -------------------------------------------------------------------------------


def bits(array: Array) -> Array:
    """The bits of an array's elements as unsigned integers: NaN payloads and signed zeros count."""
    array = np.ascontiguousarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(got: Array, expected: Array, what: str = "") -> None:
    assert got.dtype == expected.dtype, what
    np.testing.assert_array_equal(bits(got), bits(expected), err_msg=what)


def assert_kept(got: Array, problem: Problem) -> None:
    """Everything outside the slice, and every row without an adapter, is y's bit for bit."""
    kept = ~written_elements(**problem)
    np.testing.assert_array_equal(
        bits(got)[kept], bits(problem["y"])[kept], err_msg="kept elements"
    )


def assert_right(got: Array, problem: Problem) -> None:
    """got is the result of a problem with ``rounding="float32"``, within :func:`error_bound`."""
    y = problem["y"]
    assert got.dtype == y.dtype
    assert got.shape == y.shape
    assert_kept(got, problem)
    exact, bound = add_lora_reference(**problem), error_bound(**problem)
    value = got.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(value), np.isnan(exact), err_msg="where NaN is")

    # Beyond the largest number a result is infinite; at the very edge it may be either.
    largest = float(ml_dtypes.finfo(y.dtype).max)
    infinite = np.isinf(value)
    with np.errstate(invalid="ignore"):
        may_be_infinite = np.isinf(exact) | (np.abs(exact) + bound > largest)
        close = np.isfinite(exact) & (np.abs(value - exact) <= bound)
    same_sign = np.sign(value) == np.sign(exact)
    wrong = ~np.isnan(value) & ~np.where(infinite, may_be_infinite & same_sign, close)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements are wrong; the first, [{row}, {column}]: got "
            f"{value[row, column]!r}, exact {exact[row, column]!r}, "
            f"allowed error {bound[row, column]:.3e}"
        )


def assert_right_device(got: Array, problem: Problem) -> None:
    """got is the result of a problem with ``rounding="device"``."""
    assert got.dtype == np.float16
    assert got.shape == problem["y"].shape
    assert_kept(got, problem)
    low, high = device_reference(**problem)
    written = written_elements(**problem)
    value, low, high = (a.astype(np.float64)[written] for a in (got, low, high))
    assert np.all((low <= value) & (value <= high)), "outside what the rounding points allow"
