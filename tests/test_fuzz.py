"""The raw interface with garbage of every type: it computes, or raises one of the documented errors and
has written nothing. Never anything else, and never the end of the process."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from mindspore_addlora import raw
from reference import Array, Problem, assert_right, assert_same_bits, make_problem

FACTOR = int(os.environ.get("ADDLORA_TEST_FACTOR", "1"))
ALLOWED = (ValueError, TypeError, OverflowError, IndexError, MemoryError, raw.AclError)
ORDER = ("y", "x", "weight_b", "indices", "weight_a", "layer_idx", "scale", "y_offset")
ARRAYS = ("y", "x", "weight_b", "indices", "weight_a", "out")
# float() warns of an array of one element, which it takes.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# ---- layouts -------------------------------------------------------------------------------------


@st.composite
def relaid(draw: Any, array: Array) -> Array:
    """The same elements somewhere else: backwards, with gaps, transposed, at any byte, read-only."""
    for axis in range(array.ndim):
        layout = draw(st.sampled_from(["as it is", "backwards", "gaps", "moved"]))
        if layout == "backwards":
            array = np.flip(np.flip(array, axis).copy(), axis)
        elif layout == "gaps":
            step = draw(st.integers(2, 3))
            shape = list(array.shape)
            shape[axis] *= step
            wide = np.full(shape, np.array(-1).astype(array.dtype))
            some = tuple(slice(None, None, step if i == axis else None) for i in range(array.ndim))
            wide[some] = array
            array = wide[some]
        elif layout == "moved":
            array = np.moveaxis(np.moveaxis(array, axis, 0).copy(), 0, axis)
    offset = draw(st.integers(0, 3))
    if offset:
        memory = np.zeros(array.nbytes + offset, np.uint8)
        moved = memory[offset:].view(array.dtype).reshape(array.shape)
        moved[...] = array
        array = moved
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


@settings(max_examples=300 * FACTOR)
@given(st.data())
def test_any_layout_gives_the_bits_of_the_plain_one(data):
    b, h1, h2, r, w = (data.draw(st.integers(1, most)) for most in (8, 40, 40, 33, 4))
    dtype = data.draw(st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32]))
    problem = make_problem(
        np.random.default_rng(data.draw(st.integers(0, 999))),
        b=b, h1=h1, h2=h2, h3=h2 + 5, r=r, w=w, dtype=dtype, y_offset=data.draw(st.integers(0, 5)),
    )  # fmt: skip
    expected = raw.add_lora(**problem, limits="none")
    assert_right(expected, problem)
    for name in ("y", "x", "weight_b", "weight_a", "indices"):
        problem[name] = data.draw(relaid(problem[name]))
    assert_same_bits(raw.add_lora(**problem, limits="none"), expected)


# ---- garbage -------------------------------------------------------------------------------------

SIZES = st.one_of(st.sampled_from([0, 1, 2, 3, 4, 15, 16, 17, 32, 48, 64]), st.integers(0, 9))
DTYPES = st.sampled_from(
    ["e", ">e", "f", ">f", "d", "g", "F", "i", ">i", "l", "q", "b", "B", "h", "H", "?", "O", "S3", "U2",
     "M8[s]", "m8[ns]", "V4", "f2,i4", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)  # fmt: skip
HUGE = st.sampled_from([2**31 - 1, 2**31, 2**32, 2**40, 2**57, 2**62])


def repeated(array: Array, shape: list[int]) -> Array:
    """Broadcast, unless that is more than numpy counts."""
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        return array


@st.composite
def garbage_arrays(draw: Any) -> Array:
    """Any dtype, shape and layout, and axes that repeat an element without end."""
    shape = draw(st.lists(SIZES, max_size=6))
    dtype = np.dtype(draw(DTYPES))
    array = np.zeros(shape, dtype)
    if dtype.kind in "fiV" and array.size and draw(st.booleans()):
        flat = array.reshape(-1).view(np.uint8) if dtype.names is None else None
        if flat is not None:
            flat[:] = draw(st.integers(0, 255))
    kind = draw(st.sampled_from(["plain", "transposed", "backwards", "repeated", "unaligned"]))
    if kind == "transposed":
        return array.T
    if kind == "backwards":
        return array[..., ::-1] if array.ndim else array
    if kind == "repeated" and dtype.itemsize:
        shape.insert(draw(st.integers(0, len(shape))), draw(HUGE))
        return repeated(np.zeros((), dtype), shape)
    if kind == "unaligned" and dtype.kind != "O" and array.nbytes:
        return np.zeros(array.nbytes + 1, np.uint8)[1:].view(dtype).reshape(array.shape)
    return array


def base() -> Problem:
    problem = make_problem(np.random.default_rng(0), b=3, h1=48, h2=32, h3=64, r=16, w=4)
    return problem | {"out": np.ones_like(problem["y"])}


@st.composite
def nearly_right_arrays(draw: Any, name: str) -> Array:
    """The right array with one thing about it changed."""
    array = base()[name].copy()
    change = draw(st.sampled_from(["dtype", "byte order", "axis", "repeat", "cut", "bits", "dims"]))
    axis = draw(st.integers(0, array.ndim - 1))
    if change == "dtype":
        return np.zeros(array.shape, draw(DTYPES))
    if change == "byte order":
        return array.astype(array.dtype.newbyteorder())
    if change == "axis":
        return np.moveaxis(array, axis, -1)
    if change == "repeat":
        one = np.take(array, [0], axis)
        shape = [draw(HUGE) if i == axis else n for i, n in enumerate(array.shape)]
        return repeated(one, shape)
    if change == "cut":
        return np.take(array, range(draw(st.integers(0, array.shape[axis]))), axis)
    if change == "bits":
        array.reshape(-1).view(np.uint8)[:] = draw(st.integers(0, 255))
        return array
    return array.reshape(array.shape + (1,) * draw(st.integers(1, 8)))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**400]),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from(["cpu", "aclnn", "npu", "none", "float32", "device"]),
    st.sampled_from([[], {}, (), object(), int, np.int64(1), np.uint64(2**63), np.float16("nan")]),
    st.builds(lambda n: np.array(n), st.integers(-2, 2)),
    st.builds(bytearray, st.integers(0, 9)),
)
OPTIONS = ("layer_idx", "scale", "y_offset", "y_slice_size", "backend", "limits", "rounding")


ODD_BUT_RIGHT = {
    "layer_idx": st.sampled_from([0, 1, np.int8(1), np.uint64(0)]),
    "scale": st.one_of(st.floats(), st.integers(-9, 9), st.sampled_from([np.float16(2), True])),
    "y_offset": st.integers(0, 32),
    "y_slice_size": st.sampled_from([-1, 32, np.int64(32)]),
    "backend": st.sampled_from([None, "cpu"]),
    "limits": st.sampled_from(["npu", "none"]),
    "rounding": st.sampled_from(["float32", "device"]),
}


@st.composite
def calls(draw: Any) -> Problem:
    """A right call, odd in places, in which up to three arguments are garbage."""
    problem = base() | {"y_slice_size": -1}
    for name, values in ODD_BUT_RIGHT.items():
        problem[name] = draw(values)
    for name in draw(st.lists(st.sampled_from(ARRAYS[:5]), max_size=3, unique=True)):
        problem[name] = draw(relaid(problem[name]))
    if draw(st.integers(0, 2)) == 0:
        return problem
    for name in draw(st.lists(st.sampled_from(ARRAYS + OPTIONS), max_size=3, unique=True)):
        if name in OPTIONS:
            problem[name] = draw(SCALARS)
        elif draw(st.booleans()):
            problem[name] = draw(nearly_right_arrays(name))
        else:
            problem[name] = draw(st.one_of(garbage_arrays(), SCALARS))
    if draw(st.integers(0, 3)) == 0:
        # out in, or over, the memory of another argument.
        problem["out"] = problem[draw(st.sampled_from(ARRAYS))]
    return problem


def content(value: Any) -> bytes | None:
    """The bytes of an array, where they are few."""
    small = isinstance(value, np.ndarray) and value.size < 1 << 20 and not value.dtype.hasobject
    return value.tobytes() if small else None


@settings(max_examples=1500 * FACTOR)
@given(calls())
def test_one_call(problem):
    before = {name: content(problem[name]) for name in ARRAYS}
    try:
        got = raw.add_lora(**problem)
    except ALLOWED as error:
        event(type(error).__name__)
        after = {name: content(problem[name]) for name in ARRAYS}
        assert after == before, "a refused call wrote"
    else:
        event("computed")
        out = problem["out"]
        assert got is out or (out is None and got.shape == problem["y"].shape)
        for name in ARRAYS:
            if problem[name] is not out:
                assert content(problem[name]) == before[name], "an input was changed"


WORKSPACES = st.one_of(
    st.none(),
    SCALARS,
    garbage_arrays(),
    st.builds(bytearray, st.integers(0, 2000)),
    st.just("enough"),
)


@settings(max_examples=1000 * FACTOR)
@given(calls(), st.lists(st.one_of(WORKSPACES, st.just("enough")), min_size=1, max_size=3), SCALARS)
def test_two_phases(problem, workspaces, stream):
    options = {name: problem.pop(name) for name in OPTIONS[4:] if name in problem}
    arguments = [problem[name] for name in ORDER] + [problem["y_slice_size"], problem["out"]]
    before = {name: content(problem[name]) for name in ARRAYS}
    try:
        size, executor = raw.add_lora_get_workspace_size(*arguments, **options)
    except ALLOWED as error:
        event(f"first phase: {type(error).__name__}")
        size, executor = 0, None
    assert {name: content(problem[name]) for name in ARRAYS} == before, "the first phase wrote"
    for number, given_one in enumerate(workspaces):
        workspace = bytearray(size) if isinstance(given_one, str) else given_one
        try:
            raw.add_lora_execute(workspace, executor, stream if number else None)
        except ALLOWED as error:
            event(f"second phase: {type(error).__name__}")
            if number == 0:
                after = {name: content(problem[name]) for name in ARRAYS}
                assert after == before, "a refused run wrote"
        else:
            event("computed")
            assert executor is not None


@given(st.one_of(SCALARS, garbage_arrays()))
def test_other_functions(value):
    before = raw.get_num_threads()
    try:
        raw.set_num_threads(value)
    except ALLOWED:
        assert raw.get_num_threads() == before
    finally:
        raw.set_num_threads(before)
    with pytest.raises((TypeError, raw.AddLoraError)):
        raw.add_lora_execute(bytearray(10), value)
