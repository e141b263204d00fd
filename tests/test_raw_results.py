"""raw.add_lora against the oracle: sizes, index patterns, dtypes, layouts in memory, roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore_addlora import raw
from reference import (
    DTYPES,
    INDEX_PATTERNS,
    Array,
    Problem,
    active_rows,
    add_lora_reference,
    assert_kept,
    assert_right,
    assert_right_device,
    assert_same_bits,
    bits,
    device_reference,
    error_bound,
    index_pattern,
    make_exact_problem,
    make_problem,
    written_elements,
)

EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
ARRAYS = ("y", "x", "weight_b", "indices", "weight_a")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def run(problem: Problem, **options: Any) -> Array:
    return raw.add_lora(**problem, **({"limits": "none"} | options))


# ---- sizes -------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("h1", EDGES)
def test_input_widths(h1, dtype):
    problem = make_problem(np.random.default_rng(h1), h1=h1, dtype=DTYPES[dtype])
    assert_right(run(problem), problem)


@every_dtype
@pytest.mark.parametrize("h2", EDGES)
def test_slice_widths(h2, dtype):
    problem = make_problem(np.random.default_rng(h2), h2=h2, h3=h2 + 37, dtype=DTYPES[dtype])
    assert_right(run(problem), problem)


@every_dtype
@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("r", [*EDGES, 200])
def test_ranks(r, with_a, dtype):
    problem = make_problem(np.random.default_rng(r), r=r, with_a=with_a, dtype=DTYPES[dtype])
    assert_right(run(problem), problem)


@every_dtype
@pytest.mark.parametrize("b", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 300])
def test_numbers_of_rows(b, dtype):
    """Few rows and several tiles of them, most of them for few adapters."""
    rng = np.random.default_rng(b)
    indices = rng.choice([0, 0, 0, 0, 1, 3, -1], b).astype(np.int32)
    problem = make_problem(rng, b=b, h1=48, h2=40, h3=56, r=9, indices=indices, dtype=DTYPES[dtype])
    assert_right(run(problem), problem)


@every_dtype
@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 3, "h1": 4099, "h2": 16, "r": 8},
        {"b": 3, "h1": 16, "h2": 4099, "h3": 4200, "r": 8},
        {"b": 40, "h1": 1030, "h2": 1030, "h3": 1050, "r": 129, "w": 3},
        {"b": 2, "h1": 8, "h2": 8, "r": 1100, "w": 2},
    ],
    ids=str,
)
def test_sizes_of_several_blocks(sizes, dtype):
    problem = make_problem(np.random.default_rng(1), dtype=DTYPES[dtype], **sizes)
    assert_right(run(problem), problem)


@every_dtype
@pytest.mark.parametrize("r", [16, 64, 128])
def test_sizes_that_the_npu_takes(r, dtype):
    problem = make_problem(
        np.random.default_rng(r), h1=256, h2=128, h3=384, r=r, w=32, l=3, dtype=DTYPES[dtype]
    )
    assert_right(raw.add_lora(**problem), problem)


def test_many_rows_with_many_first_products():
    """More rows times ranks than scratch is likely to hold at once, in groups of uneven size."""
    rng = np.random.default_rng(5)
    indices = rng.choice([0, 0, 0, 0, 0, 1, 2, -1], 9000).astype(np.int32)
    problem = make_problem(
        rng, b=9000, h1=16, h2=16, h3=16, r=256, w=3, l=1, layer_idx=0, y_offset=0, indices=indices
    )
    assert_right(run(problem), problem)


# ---- which adapter -----------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("pattern", INDEX_PATTERNS)
@pytest.mark.parametrize("b", [1, 7, 40])
def test_index_patterns(pattern, b, with_a, dtype):
    problem = make_problem(
        np.random.default_rng(b), b=b, w=5, with_a=with_a, indices=pattern, dtype=DTYPES[dtype]
    )
    assert_right(run(problem), problem)


@pytest.mark.parametrize("w", [1, 2, 33, 500])
def test_numbers_of_adapters(w):
    """Far more adapters than rows included: a bank that is mostly unused."""
    problem = make_problem(np.random.default_rng(w), b=9, w=w)
    assert_right(run(problem), problem)


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_each_layer_has_its_weights(layer):
    problem = make_problem(np.random.default_rng(2), l=5, layer_idx=layer, indices="one")
    assert_right(run(problem), problem)
    other = problem | {"layer_idx": (layer + 1) % 5}
    assert not np.array_equal(bits(run(problem)), bits(run(other)))


@every_dtype
@pytest.mark.parametrize("y_offset", [0, 1, 15, 16, 17, 60, 100])
def test_offsets(y_offset, dtype):
    """The slice at both edges of y and between them; H3 = 133, H2 = 33."""
    problem = make_problem(
        np.random.default_rng(3), h2=33, h3=133, y_offset=y_offset, dtype=DTYPES[dtype]
    )
    assert_right(run(problem), problem)


@every_dtype
def test_a_wide_output(dtype):
    """A vocabulary of 79360 columns and a slice in its middle."""
    problem = make_problem(
        np.random.default_rng(4), b=4, h2=128, h3=79360, y_offset=40000, dtype=DTYPES[dtype]
    )
    assert_right(raw.add_lora(**problem), problem)


def test_the_slice_size_may_be_given():
    problem = make_problem(np.random.default_rng(5), h2=32)
    assert_same_bits(run(problem, y_slice_size=32), run(problem, y_slice_size=-1))


@pytest.mark.parametrize("scale", [0.0, -0.0, 1.0, -2.5, 1e-3, 16.0])
@every_dtype
def test_scales(scale, dtype):
    problem = make_problem(np.random.default_rng(6), scale=scale, dtype=DTYPES[dtype])
    assert_right(run(problem), problem)


@pytest.mark.parametrize("rounding", ["float32", "device"])
def test_scale_may_be_any_real_number(rounding):
    problem = make_problem(np.random.default_rng(6), scale=2.0)
    expected = run(problem, rounding=rounding)
    for scale in (2, np.float32(2), np.float16(2), np.int8(2)):
        assert_same_bits(run(problem | {"scale": scale}, rounding=rounding), expected)


@pytest.mark.parametrize("rounding", ["float32", "device"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_propagates(scale, rounding):
    problem = make_exact_problem(np.random.default_rng(7), scale=1.0)
    delta = add_lora_reference(**problem) - problem["y"].astype(np.float64)
    problem["scale"] = scale
    got = run(problem, rounding=rounding)
    assert_kept(got, problem)
    written = written_elements(**problem)
    with np.errstate(invalid="ignore"):
        expected = (scale * delta)[written]  # 0 * inf is NaN
    np.testing.assert_array_equal(got.astype(np.float64)[written], expected)


def test_integers_may_be_numpy_integers():
    problem = make_problem(np.random.default_rng(8))
    typed = problem | {"layer_idx": np.int32(1), "y_offset": np.uint64(16)}
    assert_same_bits(run(typed, y_slice_size=np.int16(16)), run(problem))


@pytest.mark.parametrize("limits", ["npu", "none"])
@every_dtype
def test_an_empty_batch(limits, dtype):
    problem = make_problem(np.random.default_rng(9), b=0, dtype=DTYPES[dtype])
    got = run(problem, limits=limits)
    assert got.shape == (0, 48)
    assert got.dtype == DTYPES[dtype]
    out = np.empty((0, 48), DTYPES[dtype])
    assert run(problem, limits=limits, out=out) is out


# ---- what is kept, bit for bit -----------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("place", ["allocated", "out", "in place"])
def test_every_bit_pattern_of_y_survives_where_nothing_is_added(dtype, place):
    """NaN payloads, subnormals, signed zeros: in rows without an adapter and beside the slice."""
    rng = np.random.default_rng(10)
    problem = make_problem(
        rng, b=64, h1=16, h2=17, h3=2048, y_offset=1000, indices="mixed", dtype=DTYPES[dtype]
    )
    unsigned = bits(problem["y"]).dtype
    patterns = rng.integers(0, np.iinfo(unsigned).max, problem["y"].shape, unsigned, endpoint=True)
    problem["y"] = patterns.view(DTYPES[dtype])
    assert np.isnan(problem["y"].astype(np.float32)).any()
    kept = ~written_elements(**problem)

    target = problem | {"y": problem["y"].copy()}
    if place == "out":
        target["out"] = np.empty_like(problem["y"])
    elif place == "in place":
        target["out"] = target["y"]
    got = run(target)
    np.testing.assert_array_equal(bits(got)[kept], patterns[kept])


def test_y_is_not_changed_where_out_is_another_array():
    problem = make_problem(np.random.default_rng(11), indices="one")
    before = {name: problem[name].copy() for name in ARRAYS}
    run(problem)
    run(problem, out=np.empty_like(problem["y"]))
    for name in ARRAYS:
        np.testing.assert_array_equal(problem[name].view(np.uint8), before[name].view(np.uint8))


# ---- out ---------------------------------------------------------------------------------------


@every_dtype
def test_out_is_filled_and_returned(dtype):
    problem = make_problem(np.random.default_rng(12), dtype=DTYPES[dtype])
    out = np.full(problem["y"].shape, np.nan, DTYPES[dtype])
    assert run(problem, out=out) is out
    assert_right(out, problem)
    assert_same_bits(out, run(problem))


@pytest.mark.parametrize(
    "dtype,rounding", [*((dtype, "float32") for dtype in DTYPES), ("float16", "device")]
)
def test_in_place(dtype, rounding):
    problem = make_problem(np.random.default_rng(13), b=20, dtype=DTYPES[dtype])
    expected = run(problem, rounding=rounding)
    y = problem["y"].copy()
    assert run(problem | {"y": y}, out=y, rounding=rounding) is y
    assert_same_bits(y, expected)


def test_in_place_through_an_equal_view():
    problem = make_problem(np.random.default_rng(14))
    expected = run(problem)
    y = problem["y"].copy()
    view = y[:]
    assert run(problem | {"y": y}, out=view) is view
    assert_same_bits(y, expected)


def test_out_between_the_rows_of_an_input():
    """The bounds of x enclose out, but they share no element."""
    problem = make_problem(np.random.default_rng(15), b=2, h1=48, h3=48, indices="repeated_apart")
    expected = run(problem)
    base = np.zeros((3, 2, 48), np.float16)
    x = base[::2, 0]
    x[:] = problem["x"]
    out = run(problem | {"x": x}, out=base[1])
    assert_same_bits(np.ascontiguousarray(out), expected)


@every_dtype
def test_an_unaligned_out(dtype):
    problem = make_problem(np.random.default_rng(16), dtype=DTYPES[dtype])
    out = unaligned(problem["y"])
    assert out.flags.c_contiguous
    run(problem, out=out)
    assert_same_bits(out, run(problem))


# ---- layouts in memory -------------------------------------------------------------------------


def inner_stride_two(array: Array) -> Array:
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def inner_stride_negative(array: Array) -> Array:
    return np.ascontiguousarray(array[..., ::-1])[..., ::-1]


def all_strides_negative(array: Array) -> Array:
    turn = (slice(None, None, -1),) * array.ndim
    return np.ascontiguousarray(array[turn])[turn]


def transposed(array: Array) -> Array:
    """The last two axes lie the other way round in memory."""
    if array.ndim < 2:
        return array.copy()
    return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def fortran(array: Array) -> Array:
    return np.asfortranarray(array)


def part_of_a_wider_array(array: Array) -> Array:
    wide = np.zeros(tuple(n + 3 for n in array.shape), array.dtype)
    part = wide[tuple(slice(1, n + 1) for n in array.shape)]
    part[...] = array
    return part


def read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def unaligned(array: Array) -> Array:
    copy = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), offset=1)
    assert not copy.flags.aligned
    copy[...] = array
    return copy


def unaligned_strides(array: Array) -> Array:
    """Each element at an odd distance from the one before it, as a field of a packed record is."""
    records = np.zeros(array.shape, np.dtype([("value", array.dtype), ("tag", np.uint8)]))
    records["value"] = array
    return records["value"]


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    layout.__name__: layout
    for layout in (
        inner_stride_two,
        inner_stride_negative,
        all_strides_negative,
        transposed,
        fortran,
        part_of_a_wider_array,
        read_only,
        unaligned,
        unaligned_strides,
    )
}


@every_dtype
@pytest.mark.parametrize("b", [5, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_a_bit(layout, b, dtype):
    problem = make_problem(
        np.random.default_rng(17), b=b, h1=70, h2=37, h3=90, r=18, dtype=DTYPES[dtype]
    )
    expected = run(problem)
    assert_right(expected, problem)
    for name in ARRAYS:
        changed = LAYOUTS[layout](problem[name])
        np.testing.assert_array_equal(changed, problem[name])
        assert_same_bits(run(problem | {name: changed}), expected, name)
    every = {name: LAYOUTS[layout](problem[name]) for name in ARRAYS}
    assert_same_bits(run(problem | every), expected, "all")


@every_dtype
def test_broadcast_inputs(dtype):
    """Strides of zero: one row of y and of x for all, one adapter's weights for every slot."""
    problem = make_problem(np.random.default_rng(18), b=9, dtype=DTYPES[dtype])
    problem["y"] = np.broadcast_to(problem["y"][:1], problem["y"].shape)
    problem["x"] = np.broadcast_to(problem["x"][:1], problem["x"].shape)
    problem["indices"] = np.broadcast_to(np.int32(2), 9)
    for name in ("weight_a", "weight_b"):
        problem[name] = np.broadcast_to(problem[name][:1], problem[name].shape)
    assert problem["y"].strides[0] == 0
    assert_right(run(problem), problem)
    problem["x"] = np.broadcast_to(problem["x"][:1, :1], problem["x"].shape)
    assert_right(run(problem), problem)


def test_an_input_may_be_given_twice():
    """x may be y: both are only read."""
    problem = make_problem(np.random.default_rng(19), h1=48, h3=48)
    problem["x"] = problem["y"]
    assert_right(run(problem), problem)


# ---- device rounding ---------------------------------------------------------------------------


@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("h1", [1, 15, 16, 17, 64, 129, 1030])
@pytest.mark.parametrize("r", [1, 8, 16, 33, 128])
def test_device_rounding(h1, r, with_a):
    problem = make_problem(np.random.default_rng(h1), b=9, h1=h1, h2=40, h3=64, r=r, with_a=with_a)
    assert_right_device(run(problem, rounding="device"), problem)


def test_device_rounding_is_its_own():
    """The oracle's intervals are narrow enough to tell the two roundings apart."""
    problem = make_problem(np.random.default_rng(20), b=40, h1=64, h2=40, h3=64)
    low, high = device_reference(**problem)
    written = written_elements(**problem)
    assert np.mean((bits(low) == bits(high))[written]) > 0.9
    assert not np.array_equal(bits(run(problem)), bits(run(problem, rounding="device")))
    with pytest.raises(AssertionError, match="rounding points"):
        assert_right_device(run(problem), problem)


@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("h1,r", [(16, 16), (17, 3), (128, 64), (300, 129)])
def test_device_rounding_of_exact_sums(h1, r, with_a):
    """Sums of small integers are exact in float32 in any order, so every bit is known."""
    problem = make_exact_problem(
        np.random.default_rng(21), b=30, h1=h1, h2=37, h3=64, r=r, scale=0.3, with_a=with_a
    )
    expected, same = device_reference(**problem, exact_sums=True)
    assert_same_bits(expected, same)
    assert_same_bits(run(problem, rounding="device"), expected)


@pytest.mark.parametrize(
    "x,a,b,scale,y,expected",
    [
        # Z1 = fp16(2049) = 2048: the first product is rounded before the second.
        ([2048, 1], [1, 1], 1, 1.0, 0, 2048),
        ([2048, 3], [1, 1], 1, 1.0, 0, 2052),
        # Z2 = fp16(2048 * 1.0009765625) = 2050 is exact; d = fp16(2050 * fp16(0.1)).
        ([2048, 0], [1, 0], 1.0009765625, 0.1, 0, np.float16(2050 * float(np.float16(0.1)))),
        # d = fp16(1 * fp16(1/3)) is rounded before it is added.
        ([1, 0], [1, 0], 1, 1 / 3, 1, np.float16(1 + float(np.float16(1 / 3)))),
        # y + d is rounded to even at the end.
        ([1, 0], [1, 0], 1, 1.0, 2048, 2048),
        ([3, 0], [1, 0], 1, 1.0, 2048, 2052),
        # A first product beyond float16 is infinite, though the result would be small.
        ([60000, 60000], [1, 1], 0.0625, 1.0, 0, np.inf),
        # scale above float16 is infinite; 65519 still rounds to 65504.
        ([1, 0], [1, 0], 1, 70000.0, 0, np.inf),
        ([0.5, 0], [1, 0], 1, 65519.0, 0, 32752),
        # A scale below the smallest half subnormal is zero.
        ([1024, 0], [1, 0], 1, 1e-9, 0, 0),
        # Subnormal steps are kept: 2**-24.
        ([2**-12, 0], [2**-12, 0], 1, 1.0, 0, 2**-24),
        ([2**-12, 0], [2**-12, 0], 1, 0.5, 0, 0),
    ],
)
def test_device_rounding_points(x, a, b, scale, y, expected):
    got = raw.add_lora(
        np.full((1, 1), y, np.float16),
        np.array([x], np.float16),
        np.full((1, 1, 1, 1), b, np.float16),
        np.zeros(1, np.int32),
        np.array(a, np.float16).reshape(1, 1, 1, 2),
        scale=scale,
        limits="none",
        rounding="device",
    )
    assert got[0, 0] == np.float16(expected)


# ---- float32 rounding, exactly -----------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("h1,r", [(16, 16), (17, 3), (128, 64), (300, 129)])
def test_exact_sums_are_rounded_once(h1, r, with_a, dtype):
    """Where every sum is exact, the result is the exact value rounded to the dtype."""
    problem = make_exact_problem(
        np.random.default_rng(22),
        b=30,
        h1=h1,
        h2=37,
        h3=64,
        r=r,
        with_a=with_a,
        dtype=DTYPES[dtype],
    )
    exact = add_lora_reference(**problem).astype(np.float32)
    np.testing.assert_array_equal(exact, add_lora_reference(**problem))
    expected = exact.astype(DTYPES[dtype])
    np.testing.assert_array_equal(run(problem), expected)


@pytest.mark.parametrize(
    "dtype,y,delta,expected",
    [
        # Ties go to even, and half an ulp plus a little goes up.
        ("float16", 2048, 1, 2048),
        ("float16", 2050, 1, 2052),
        ("float16", 2048, 1.0078125, 2050),
        ("bfloat16", 256, 1, 256),
        ("bfloat16", 258, 1, 260),
        ("bfloat16", 256, 1.0078125, 258),
        ("float32", 2**24, 1, 2**24),
        ("float32", 2**24, 3, 2**24 + 4),
        # The edge of overflow.
        ("float16", 65504, 15, 65504),
        ("float16", 65504, 16, np.inf),
        ("float16", -65504, -16, -np.inf),
        ("bfloat16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), 2.0**119, np.inf),
        ("float32", float(np.finfo(np.float32).max), 2.0**103, np.inf),
        # Subnormal results are kept.
        ("float16", 2**-24, 2**-24, 2**-23),
        ("float32", 2**-149, 2**-149, 2**-148),
        ("bfloat16", 2**-133, 2**-133, 2**-132),
        # Infinities and NaN that y or the product brings.
        ("float16", np.inf, 1, np.inf),
        ("float32", np.inf, -np.inf, np.nan),
        ("bfloat16", np.nan, 1, np.nan),
    ],
)
def test_the_last_rounding(dtype, y, delta, expected):
    dtype = DTYPES[dtype]
    got = raw.add_lora(
        np.full((1, 1), y).astype(dtype),
        np.full((1, 1), delta).astype(dtype),
        np.ones((1, 1, 1, 1), dtype),
        np.zeros(1, np.int32),
        limits="none",
    )
    np.testing.assert_array_equal(got.astype(np.float64), [[expected]])


@every_dtype
def test_products_are_summed_in_float32(dtype):
    """A sum of 4096 ones stops short of 4096 where it is kept in half a width."""
    ones = np.ones((1, 4096), DTYPES[dtype])
    got = raw.add_lora(
        np.zeros((1, 16), DTYPES[dtype]),
        ones,
        np.ones((1, 1, 16, 1), DTYPES[dtype]),
        np.zeros(1, np.int32),
        ones.reshape(1, 1, 1, 4096),
        limits="none",
    )
    np.testing.assert_array_equal(got.astype(np.float64), np.full((1, 16), 4096.0))


def test_the_bound_is_not_loose():
    """An error of two parts in 1000 of the product is found: the oracle can fail."""
    problem = make_problem(np.random.default_rng(23), indices="one", h1=64)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_right(run(problem | {"scale": problem["scale"] * 1.002}), problem)
    exact, bound = add_lora_reference(**problem), error_bound(**problem)
    written = written_elements(**problem)
    ulp = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
    assert np.median((bound / ulp)[written]) < 0.6


# ---- NaN isolation -----------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("b", [7, 40])
def test_nan_where_nothing_is_used_reaches_no_result(b, with_a, dtype):
    rng = np.random.default_rng(24)
    indices = rng.choice([1, 3, -1, 6], b).astype(np.int32)
    problem = make_problem(
        rng, b=b, w=6, l=3, h1=33, h2=19, r=11, with_a=with_a, indices=indices, dtype=DTYPES[dtype]
    )
    expected = run(problem)
    assert_right(expected, problem)

    poisoned = problem | {"x": problem["x"].copy()}
    active = active_rows(indices, 6)
    poisoned["x"][np.setdiff1d(np.arange(b), active)] = np.nan
    for name in ("weight_a", "weight_b"):
        if problem[name] is not None:
            bank = np.full_like(problem[name], np.nan)
            for adapter in (1, 3):
                bank[adapter, 1] = problem[name][adapter, 1]
            poisoned[name] = bank
    out = np.full(problem["y"].shape, np.nan, DTYPES[dtype])
    assert_same_bits(run(poisoned, out=out), expected)


@every_dtype
@pytest.mark.parametrize("pad", [1, 5, 16])
def test_nan_beside_the_inputs_reaches_no_result(pad, dtype):
    """Each array is part of a wider one that is NaN: no sum takes in what is past a row."""
    problem = make_problem(
        np.random.default_rng(25), b=9, h1=19, h2=21, h3=40, r=9, dtype=DTYPES[dtype]
    )
    expected = run(problem)
    surrounded = dict(problem)
    for name in ("y", "x", "weight_a", "weight_b"):
        array = problem[name]
        wide = np.full((*array.shape[:-1], array.shape[-1] + 2 * pad), np.nan, array.dtype)
        surrounded[name] = wide[..., pad:-pad]
        surrounded[name][...] = array
    assert_same_bits(run(surrounded), expected)


@every_dtype
def test_nan_of_one_row_stays_in_its_row(dtype):
    problem = make_problem(np.random.default_rng(26), b=40, indices="one", dtype=DTYPES[dtype])
    expected = run(problem)
    poisoned = problem | {"x": problem["x"].copy()}
    poisoned["x"][11] = np.nan
    got = run(poisoned)
    others = np.arange(40) != 11
    assert_same_bits(got[others], expected[others])
    assert np.isnan(got[11, 16:32].astype(np.float32)).all()
    assert_kept(got, poisoned)


# ---- anything ----------------------------------------------------------------------------------


sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 129]))


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(DTYPES)) -> tuple[Problem, Problem]:
    """A problem of contiguous arrays, and the same one with other layouts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    h2 = draw(sizes)
    y_offset = draw(st.integers(0, 40))
    b, w, layers = draw(st.integers(0, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    problem = make_problem(
        rng,
        b=b,
        h1=draw(sizes),
        h2=h2,
        h3=h2 + y_offset + draw(st.integers(0, 40)),
        r=draw(sizes),
        w=w,
        l=layers,
        dtype=DTYPES[draw(st.sampled_from(dtypes))],
        with_a=draw(st.booleans()),
        indices=index_pattern(draw(st.sampled_from(INDEX_PATTERNS)), rng, b, w),
        layer_idx=draw(st.integers(0, layers - 1)),
        scale=draw(st.floats(-8, 8, width=16, allow_subnormal=False)),
        y_offset=y_offset,
    )
    layout = st.one_of(st.none(), st.sampled_from(list(LAYOUTS)))
    laid_out = dict(problem)
    for name in ARRAYS:
        chosen = draw(layout)
        if chosen is not None and problem[name] is not None and problem[name].size > 0:
            laid_out[name] = LAYOUTS[chosen](problem[name])
    return problem, laid_out


@given(problems(), st.sampled_from(["allocated", "out", "in place"]))
def test_any_problem(both, place):
    problem, laid_out = both
    if place == "out":
        laid_out["out"] = np.full(problem["y"].shape, np.nan, problem["y"].dtype)
    elif place == "in place":
        laid_out["y"] = laid_out["out"] = problem["y"].copy()
    assert_right(run(laid_out), problem)


@given(problems(dtypes=("float16",)))
def test_any_problem_with_device_rounding(both):
    problem, laid_out = both
    assert_right_device(run(laid_out, rounding="device"), problem)


@given(problems(), st.data())
def test_any_problem_with_an_index_above_w(both, data):
    problem, laid_out = both
    b, w = len(problem["indices"]), problem["weight_b"].shape[0]
    if b == 0:
        return
    row = data.draw(st.integers(0, b - 1))
    value = data.draw(st.integers(w + 1, np.iinfo(np.int32).max))
    indices = problem["indices"].copy()
    indices[row] = value
    out = np.full(problem["y"].shape, 7, problem["y"].dtype)
    before = out.copy()
    with pytest.raises(raw.AddLoraError, match=rf"indices.*\b{value}\b.*\b{row}\b") as refusal:
        run(laid_out | {"indices": indices}, out=out)
    assert refusal.value.code == 561002
    assert_same_bits(out, before)


@given(problems())
def test_a_row_alone_has_the_bits_it_has_in_a_batch(both):
    problem, _ = both
    expected = run(problem)
    for row in range(len(problem["indices"])):
        alone = problem | {name: problem[name][row : row + 1] for name in ("y", "x", "indices")}
        assert_same_bits(run(alone), expected[row : row + 1])


# ---- more than 2**31 elements ------------------------------------------------------------------

ROWS, COLUMNS = 66_000, 32_768  # 2**31 + 15,204,352 elements


def available_memory() -> int:
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


needs_memory = pytest.mark.skipif(
    available_memory() < 10 << 30, reason="needs 10 GB of available memory"
)


def huge_problem() -> Problem:
    """Rows at both ends and around 2**30 and 2**31 elements use an adapter."""
    rng = np.random.default_rng(27)
    indices = np.full(ROWS, -1, np.int32)
    indices[[0, 1, 32_767, 32_768, 65_535, 65_536, ROWS - 1]] = [0, 1, 0, 1, 1, 0, 1]
    problem = make_problem(rng, b=1, r=16, h1=16, w=2, l=1, layer_idx=0)
    return problem | {
        "x": rng.standard_normal((ROWS, 16), np.float32).astype(np.float16),
        "indices": indices,
        "y_offset": COLUMNS - 16,
    }


def narrowed(problem: Problem, y: Array) -> Problem:
    """The rows with an adapter and the last 32 columns of y."""
    rows = active_rows(problem["indices"], 2)
    part = {name: problem[name][rows] for name in ("x", "indices")}
    return problem | part | {"y": np.ascontiguousarray(y[rows, -32:]), "y_offset": 16}


@needs_memory
def test_more_than_two_to_the_31_elements_in_place():
    """Only the pages that are written exist: y is zero memory of the system's."""
    problem = huge_problem()
    y = np.zeros((ROWS, COLUMNS), np.float16)
    small = narrowed(problem, y)
    assert raw.add_lora(**problem | {"y": y}, out=y) is y
    rows = active_rows(problem["indices"], 2)
    assert_right(np.ascontiguousarray(y[rows, -32:]), small)
    # A wrapped offset would have written elsewhere.
    y[rows] = 0
    assert not any(y[i : i + 1000].view(np.uint64).any() for i in range(0, ROWS, 1000))


@needs_memory
def test_more_than_two_to_the_31_elements_copied():
    problem = huge_problem()
    row = np.arange(COLUMNS).astype(np.float16)
    y = np.broadcast_to(row, (ROWS, COLUMNS))
    got = raw.add_lora(**problem | {"y": y})
    rows = active_rows(problem["indices"], 2)
    assert_right(np.ascontiguousarray(got[rows, -32:]), narrowed(problem, y))
    got[rows] = row
    assert all(np.all(got[i : i + 1000] == row) for i in range(0, ROWS, 1000))


@needs_memory
def test_strides_of_more_than_two_to_the_31_elements():
    """The second adapter and the last rows of x lie beyond the 2**31st element of their arrays."""
    problem = make_problem(
        np.random.default_rng(28), w=2, l=1, layer_idx=0, indices="repeated_apart"
    )
    expected = run(problem)
    far = {}
    for name in ("weight_a", "weight_b"):
        memory = np.zeros(2**31 + 2**16, np.float16)
        bank = np.lib.stride_tricks.as_strided(
            memory, problem[name].shape, (2**32, *problem[name].strides[1:])
        )
        bank[...] = problem[name]
        far[name] = bank
    x = np.zeros((6, 2**29), np.float16)[:, -32:]
    x[...] = problem["x"]
    assert_same_bits(run(problem | far | {"x": x}), expected)
