"""Every rule of raw: what it accepts, what it refuses, with which code and in which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore_addlora import raw
from reference import Array, Problem, assert_right, bits, make_problem

NULL, INVALID, SHAPE = 161001, 161002, 561002
BFLOAT16 = ml_dtypes.bfloat16
INT64_MAX = 2**63 - 1

# B = 3, H1 = 48, H2 = 32, H3 = 64, R = 16, W = 4, L = 2
BASE_SIZES: dict[str, Any] = {
    "b": 3,
    "h1": 48,
    "h2": 32,
    "h3": 64,
    "w": 4,
    "indices": "repeated_apart",
}

Call = Callable[..., Any]


def base(**sizes: Any) -> Problem:
    return make_problem(np.random.default_rng(1), **(BASE_SIZES | sizes))


def one_call(problem: Problem) -> Array:
    return raw.add_lora(**problem)


def first_phase(problem: Problem) -> Array | None:
    """The same arguments, by position in aclnn's order where that is how they are given."""
    options = {"weight_a": None, "layer_idx": 0, "scale": 1.0, "y_offset": 0, "y_slice_size": -1}
    arguments = options | problem
    order = ("y", "x", "weight_b", "indices", *options, "out")
    positional = [arguments.pop(name) for name in order]
    size, executor = raw.add_lora_get_workspace_size(*positional, **arguments)
    raw.add_lora_execute(bytearray(size) if size else None, executor)
    return problem["out"]


every_call = pytest.mark.parametrize("call", [one_call, first_phase])


# ---- what is refused ---------------------------------------------------------------------------


class Refusal(NamedTuple):
    name: str
    code: int
    argument: str
    """What the message must name; alternatives with |."""
    expected: str
    """A pattern of what the message says was expected."""
    actual: str
    """A pattern of what the message says came."""
    change: Callable[[], Problem]
    """The arguments that differ from a good call's, as a whole problem."""
    lifted: bool = False
    """Whether limits="none" accepts it."""


def with_(**arguments: Any) -> Callable[[], Problem]:
    return lambda: base() | arguments


def sized(**sizes: Any) -> Callable[[], Problem]:
    return lambda: base(**sizes)


def reshaped(name: str, *shape: int, dtype: Any = np.float16) -> Callable[[], Problem]:
    return with_(**{name: np.zeros(shape, dtype)})


def of_dtype(name: str, dtype: Any) -> Callable[[], Problem]:
    def change() -> Problem:
        problem = base()
        return problem | {name: np.zeros(problem[name].shape, dtype)}

    return change


def all_of_dtype(dtype: Any, **arguments: Any) -> Callable[[], Problem]:
    return lambda: base(dtype=dtype) | arguments


def indexed(row: int, value: int) -> Callable[[], Problem]:
    def change() -> Problem:
        problem = base()
        problem["indices"][row] = value
        return problem

    return change


GIVEN = [
    Refusal(f"no {name}", NULL, name, r".", r"\bNone\b", with_(**{name: None}))
    for name in ("y", "x", "weight_b", "indices")
]

FLOAT_DTYPES = [
    Refusal(f"{name} of {dtype}", INVALID, name, r"\bfloat16\b", actual, of_dtype(name, dtype))
    for name in ("x", "weight_b", "weight_a")
    for dtype, actual in [
        ("float64", r"\bfloat64\b"),
        ("float32", r"\bfloat32\b"),
        (BFLOAT16, r"\bbfloat16\b"),
        ("int16", r"\bint16\b"),
        ("complex64", r"\bcomplex64\b"),
        ("bool", r"\bbool\b"),
        ("object", r"\bobject\b"),
        ("U1", r"U1|\bstr"),
        ("datetime64[s]", r"\bdatetime64\b"),
        ("V2", r"V2|\bvoid"),
        (">f2", r">f2|endian|byte order"),
    ]
]
# y is the first to be looked at: a dtype of its own that others lack may be told of them.
Y_DTYPES = [
    Refusal("y of float64", INVALID, "y", r"\bfloat16\b", r"\bfloat64\b", of_dtype("y", "float64")),
    Refusal(
        "y of >f2", INVALID, "y", r"\bfloat16\b", r">f2|endian|byte order", of_dtype("y", ">f2")
    ),
    Refusal(
        "y of >f4", INVALID, "y", r"\bfloat16\b", r">f4|endian|byte order", of_dtype("y", ">f4")
    ),
    Refusal(
        "y alone of float32",
        INVALID,
        "y|x",
        r"\bfloat(16|32)\b",
        r"\bfloat(16|32)\b",
        of_dtype("y", "float32"),
    ),
    Refusal(
        "all of float64", INVALID, "y", r"\bfloat16\b", r"\bfloat64\b", all_of_dtype(np.float64)
    ),
    Refusal("all of int32", INVALID, "y", r"\bfloat16\b", r"\bint32\b", all_of_dtype(np.int32)),
]

INDICES_DTYPES = [
    Refusal(
        f"indices of {dtype}", INVALID, "indices", r"\bint32\b", actual, of_dtype("indices", dtype)
    )
    for dtype, actual in [
        ("int64", r"\bint64\b"),
        ("int16", r"\bint16\b"),
        ("uint32", r"\buint32\b"),
        ("bool", r"\bbool\b"),
        ("float32", r"\bfloat32\b"),
        ("float16", r"\bfloat16\b"),
        (">i4", r">i4|endian|byte order"),
    ]
]

ROUNDING_DTYPES = [
    Refusal(
        f"device rounding of {name}",
        INVALID,
        "rounding",
        r"\bfloat16\b",
        rf"\b{name}\b",
        all_of_dtype(dtype, rounding="device"),
    )
    for name, dtype in [("bfloat16", BFLOAT16), ("float32", np.float32)]
]

SHAPES = [
    Refusal("y 0-D", SHAPE, "y", r"H3", r"\[\]|\(\)", reshaped("y")),
    Refusal("y 1-D", SHAPE, "y", r"H3", r"\b64\b", reshaped("y", 64)),
    Refusal("y 3-D", SHAPE, "y", r"H3", r"3, 1, 64", reshaped("y", 3, 1, 64)),
    Refusal("y without columns", SHAPE, "y", r"H3", r"3, 0", reshaped("y", 3, 0)),
    Refusal("x 1-D", SHAPE, "x", r"H1", r"\b48\b", reshaped("x", 48)),
    Refusal("x 3-D", SHAPE, "x", r"H1", r"3, 48, 1", reshaped("x", 3, 48, 1)),
    Refusal("x without columns", SHAPE, "x", r"H1", r"3, 0", reshaped("x", 3, 0)),
    Refusal("x with fewer rows", SHAPE, "x", r"\b3\b", r"2, 48", reshaped("x", 2, 48)),
    Refusal("x with no rows", SHAPE, "x", r"\b3\b", r"0, 48", reshaped("x", 0, 48)),
    Refusal("x without A is not R wide", SHAPE, "x", r"\b16\b", r"3, 48", with_(weight_a=None)),
    Refusal(
        "weight_b 3-D", SHAPE, "weight_b", r"H2", r"4, 32, 16", reshaped("weight_b", 4, 32, 16)
    ),
    Refusal(
        "weight_b 5-D",
        SHAPE,
        "weight_b",
        r"H2",
        r"1, 4, 2, 32, 16",
        reshaped("weight_b", 1, 4, 2, 32, 16),
    ),
    Refusal("weight_b 32-D", SHAPE, "weight_b", r"H2", r"1, 1, 1", reshaped("weight_b", *[1] * 32)),
    *(
        Refusal(
            f"weight_b without {what}",
            SHAPE,
            "weight_b",
            r"H2",
            ", ".join(map(str, shape)),
            reshaped("weight_b", *shape),
        )
        for what, shape in [
            ("W", (0, 2, 32, 16)),
            ("L", (4, 0, 32, 16)),
            ("H2", (4, 2, 0, 16)),
            ("R", (4, 2, 32, 0)),
        ]
    ),
    Refusal("H2 above H3", SHAPE, "weight_b", r"\b64\b", r"\b80\b", sized(h2=80, y_offset=0)),
    Refusal(
        "indices 0-D", SHAPE, "indices", r"\b3\b", r"\[\]|\(\)", reshaped("indices", dtype=np.int32)
    ),
    Refusal(
        "indices 2-D",
        SHAPE,
        "indices",
        r"\b3\b",
        r"3, 1",
        reshaped("indices", 3, 1, dtype=np.int32),
    ),
    Refusal(
        "too few indices",
        SHAPE,
        "indices",
        r"\b3\b",
        r"\b2\b",
        reshaped("indices", 2, dtype=np.int32),
    ),
    Refusal(
        "too many indices",
        SHAPE,
        "indices",
        r"\b3\b",
        r"\b4\b",
        reshaped("indices", 4, dtype=np.int32),
    ),
    *(
        Refusal(
            f"weight_a {what}",
            SHAPE,
            "weight_a",
            r"4, 2, 16, 48",
            ", ".join(map(str, shape)),
            reshaped("weight_a", *shape),
        )
        for what, shape in [
            ("3-D", (4, 16, 48)),
            ("5-D", (4, 2, 16, 48, 1)),
            ("of other W", (3, 2, 16, 48)),
            ("of other L", (4, 1, 16, 48)),
            ("of other R", (4, 2, 32, 48)),
            ("of other H1", (4, 2, 16, 32)),
            ("empty", (4, 2, 16, 0)),
            ("transposed", (4, 2, 48, 16)),
        ]
    ),
]

SCALARS = [
    *(
        Refusal(
            f"layer_idx {n}", SHAPE, "layer_idx", r"\b2\b", rf"(?<!\d){n}\b", with_(layer_idx=n)
        )
        for n in (-1, 2, 3, INT64_MAX, -INT64_MAX - 1)
    ),
    # H3 - H2 = 32; the greatest integers must not wrap.
    *(
        Refusal(f"y_offset {n}", SHAPE, "y_offset", r"\b64\b", rf"(?<!\d){n}\b", with_(y_offset=n))
        for n in (-1, 33, 64, INT64_MAX, -INT64_MAX - 1)
    ),
    *(
        Refusal(
            f"y_slice_size {n}",
            SHAPE,
            "y_slice_size",
            r"\b32\b",
            rf"(?<!\d){n}\b",
            with_(y_slice_size=n),
        )
        for n in (-2, 0, 16, 31, 33, 64, INT64_MAX, -INT64_MAX - 1)
    ),
]

LIMITED = [
    *(
        Refusal(
            f"R = {n}", SHAPE, "weight_b|weight_a", r"\b16\b", rf"\b{n}\b", sized(r=n), lifted=True
        )
        for n in (1, 8, 15, 17, 24)
    ),
    Refusal(
        "R = 144", SHAPE, "weight_b|weight_a", r"\b128\b", r"\b144\b", sized(r=144), lifted=True
    ),
    Refusal(
        "R = 8 without A",
        SHAPE,
        "weight_b|x",
        r"\b16\b",
        r"\b8\b",
        sized(r=8, with_a=False),
        lifted=True,
    ),
    Refusal("W = 33", SHAPE, "weight_b|weight_a", r"\b32\b", r"\b33\b", sized(w=33), lifted=True),
    Refusal("L = 33", SHAPE, "weight_b|weight_a", r"\b32\b", r"\b33\b", sized(l=33), lifted=True),
    *(
        Refusal(f"H1 = {n}", SHAPE, "x", expected, rf"\b{n}\b", sized(h1=n), lifted=True)
        for n, expected in [
            (15, r"\b16\b"),
            (17, r"\b16\b"),
            (40, r"\b16\b"),
            (131_088, r"\b131072\b"),
        ]
    ),
    *(
        Refusal(f"H2 = {n}", SHAPE, "weight_b", r"\b16\b", rf"\b{n}\b", sized(h2=n), lifted=True)
        for n in (1, 17, 24)
    ),
    *(
        Refusal(f"H3 = {n}", SHAPE, "y", expected, rf"\b{n}\b", sized(h3=n), lifted=True)
        for n, expected in [(63, r"\b16\b"), (65, r"\b16\b"), (131_088, r"\b131072\b")]
    ),
    Refusal(
        "H2 = 131088",
        SHAPE,
        "weight_b|y",
        r"\b131072\b",
        r"\b1310(88|104)\b",
        sized(h2=131_088, h3=131_104),
        lifted=True,
    ),
]

INDICES = [
    Refusal("index 5 in row 0", SHAPE, "indices", r"\b4\b", r"\b5\b.*\b0\b", indexed(0, 5)),
    Refusal("index 5 in row 2", SHAPE, "indices", r"\b4\b", r"\b5\b.*\b2\b", indexed(2, 5)),
    Refusal(
        "the greatest index",
        SHAPE,
        "indices",
        r"\b4\b",
        r"\b2147483647\b.*\b1\b",
        indexed(1, 2**31 - 1),
    ),
]


def read_only(problem: Problem) -> Array:
    out = problem["y"].copy()
    out.flags.writeable = False
    return out


def overlapping(name: str, **sizes: Any) -> Callable[[], Problem]:
    """out begins one element into the memory of an input, or one element before its end."""

    def change() -> Problem:
        problem = base(**sizes)
        array = problem[name]
        out_bytes = problem["y"].nbytes
        memory = np.zeros(array.nbytes + out_bytes, np.uint8)
        begin = array.nbytes - array.itemsize  # of out: the last element of the input is its first
        problem[name] = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
        problem[name][...] = array
        out = memory[begin : begin + out_bytes].view(problem["y"].dtype)
        return problem | {"out": out.reshape(problem["y"].shape)}

    return change


def shifted(elements: int) -> Callable[[], Problem]:
    """out lies that many elements after y in the same memory."""

    def change() -> Problem:
        problem = base()
        y = problem["y"]
        memory = np.zeros(2 * y.size, y.dtype)
        problem["y"] = memory[: y.size].reshape(y.shape)
        problem["y"][...] = y
        return problem | {"out": memory[elements : elements + y.size].reshape(y.shape)}

    return change


def same_memory_other_strides() -> Problem:
    """y is every second row of a memory whose first rows are out."""
    problem = base()
    memory = np.zeros((6, 64), np.float16)
    memory[::2] = problem["y"]
    return problem | {"y": memory[::2], "out": memory[:3]}


def broadcast_over_out() -> Problem:
    problem = base()
    out = problem["y"].copy()
    return problem | {"y": np.broadcast_to(out[0], out.shape), "out": out}


def in_place_over_x() -> Problem:
    problem = base()
    y = problem["y"]
    return problem | {"x": y[:, :48], "out": y}


def bad_out(
    name: str, code: int, expected: str, actual: str, make: Callable[[Problem], Array]
) -> Refusal:
    def change() -> Problem:
        problem = base()
        return problem | {"out": make(problem)}

    return Refusal(f"out {name}", code, "out", expected, actual, change)


def zeros(*shape: int, dtype: Any = np.float16) -> Callable[[Problem], Array]:
    return lambda problem: np.zeros(shape, dtype)


FLOAT16, SAME_SHAPE, CONTIGUOUS, APART = r"\bfloat16\b", "3, 64", "contiguous", "apart|overlap"
STRIDED = "strided|not|non"

OUT = [
    bad_out("of float32", INVALID, FLOAT16, r"\bfloat32\b", zeros(3, 64, dtype=np.float32)),
    bad_out("of int16", INVALID, FLOAT16, r"\bint16\b", zeros(3, 64, dtype=np.int16)),
    bad_out("of >f2", INVALID, FLOAT16, r">f2|endian|byte order", zeros(3, 64, dtype=">f2")),
    bad_out("1-D", SHAPE, SAME_SHAPE, r"\b192\b", zeros(192)),
    bad_out("with fewer rows", SHAPE, SAME_SHAPE, "2, 64", zeros(2, 64)),
    bad_out("with fewer columns", SHAPE, SAME_SHAPE, "3, 63", zeros(3, 63)),
    bad_out("transposed", SHAPE, SAME_SHAPE, "64, 3", zeros(64, 3)),
    bad_out("strided", INVALID, CONTIGUOUS, STRIDED, lambda p: zeros(3, 128)(p)[:, ::2]),
    bad_out("in Fortran order", INVALID, CONTIGUOUS, STRIDED, lambda p: zeros(64, 3)(p).T),
    bad_out("part of an array", INVALID, CONTIGUOUS, STRIDED, lambda p: zeros(3, 65)(p)[:, :64]),
    bad_out("backwards", INVALID, CONTIGUOUS, STRIDED, lambda p: zeros(3, 64)(p)[::-1]),
    bad_out("read-only", INVALID, "writ", "read-only|not writ", read_only),
    *(
        Refusal(f"out over {name}", INVALID, "out", APART, rf"\b{name}\b", overlapping(name))
        for name in ("x", "weight_b", "indices", "weight_a", "y")
    ),
    Refusal(
        "out over x without A", INVALID, "out", APART, r"\bx\b", overlapping("x", with_a=False)
    ),
    *(
        Refusal(f"out {n} elements after y", INVALID, "out", APART, r"\by\b", shifted(n))
        for n in (1, 64, 191)
    ),
    Refusal(
        "out over y with other strides", INVALID, "out", APART, r"\by\b", same_memory_other_strides
    ),
    Refusal("out over a broadcast y", INVALID, "out", APART, r"\by\b", broadcast_over_out),
    Refusal("out is y, and x overlaps it", INVALID, "out", APART, r"\bx\b", in_place_over_x),
]

REFUSALS = [
    *GIVEN, *FLOAT_DTYPES, *Y_DTYPES, *INDICES_DTYPES, *ROUNDING_DTYPES, *SHAPES, *SCALARS,
    *LIMITED, *INDICES, *OUT,
]  # fmt: skip

every_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)


def with_out(problem: Problem) -> Problem:
    """An out that shows whether it was written, where the case brings none of its own."""
    if "out" not in problem:
        y = problem["y"] if isinstance(problem["y"], np.ndarray) else base()["y"]
        problem["out"] = np.full(y.shape, 1, y.dtype) if y.dtype.kind not in "OU" else y.copy()
    return problem


def assert_refused(refusal: Refusal, call: Call, problem: Problem) -> str:
    problem = with_out(problem)
    before = problem["out"].tobytes()
    with pytest.raises(raw.AddLoraError) as caught:
        call(problem)
    message = str(caught.value)
    assert caught.value.code == refusal.code, message
    for pattern in (rf"\b({refusal.argument})\b", refusal.expected, refusal.actual):
        assert re.search(pattern, message), f"{pattern} is not in: {message}"
    assert problem["out"].tobytes() == before, "a refused call wrote"
    return message


@every_call
@every_refusal
def test_refused(refusal, call):
    assert_refused(refusal, call, refusal.change())


@pytest.mark.parametrize(
    "refusal",
    [refusal for refusal in REFUSALS if refusal not in OUT],
    ids=lambda refusal: refusal.name,
)
def test_refused_alike_where_out_is_to_be_allocated(refusal):
    with pytest.raises(raw.AddLoraError) as caught:
        one_call(refusal.change())
    assert caught.value.code == refusal.code
    assert str(caught.value) == assert_refused(refusal, one_call, refusal.change())


@every_refusal
def test_limits_none_lifts_the_sizes_and_nothing_else(refusal):
    problem = refusal.change() | {"limits": "none"}
    if not refusal.lifted:
        assert_refused(refusal, one_call, problem)
        return
    got = one_call(problem)
    del problem["limits"]
    assert_right(got, problem)


def test_out_is_required_in_the_first_phase():
    with pytest.raises(raw.AddLoraError, match=r"\bout\b.*\bNone\b") as caught:
        first_phase(base() | {"out": None})
    assert caught.value.code == NULL


@every_call
@pytest.mark.parametrize("where", ["in place", "out"])
def test_a_bad_index_in_the_last_of_many_rows_writes_nothing(where, call):
    indices = np.zeros(1000, np.int32)
    indices[999] = 5
    problem = base(b=1000, indices=indices)
    problem["out"] = problem["y"] if where == "in place" else np.zeros_like(problem["y"])
    before = problem["out"].copy()
    with pytest.raises(raw.AddLoraError, match=r"\b5\b.*\b999\b") as caught:
        call(problem)
    assert caught.value.code == SHAPE
    np.testing.assert_array_equal(bits(problem["out"]), bits(before))


@pytest.mark.parametrize(
    "change,code",
    [({"layer_idx": 2}, SHAPE), ({"y_slice_size": 1}, SHAPE), ({"x": np.zeros((0, 48))}, INVALID)],
    ids=["layer", "slice", "dtype"],
)
def test_an_empty_batch_is_checked_too(change, code):
    with pytest.raises(raw.AddLoraError) as caught:
        one_call(base(b=0) | change)
    assert caught.value.code == code


# ---- what is accepted --------------------------------------------------------------------------


ACCEPTED: dict[str, Callable[[], Problem]] = {
    "R = 16": sized(r=16),
    "R = 128": sized(r=128),
    "R = 144 without A": sized(r=144, with_a=False),
    "R = 1600 without A": sized(r=1600, with_a=False),
    "W = 1": sized(w=1),
    "W = 32": sized(w=32),
    "L = 1": sized(l=1, layer_idx=0),
    "L = 32, the last layer": sized(l=32, layer_idx=31),
    "the first layer": with_(layer_idx=0),
    "H1 = 16": sized(h1=16),
    "H1 = 131072": sized(h1=131_072),
    "H2 = 16": sized(h2=16),
    "H2 = H3": sized(h2=64, y_offset=0),
    "H2 = H3 = 131072": sized(h2=131_072, h3=131_072, y_offset=0),
    "H3 = 16": sized(h2=16, h3=16, y_offset=0),
    "H3 = 131072": sized(h3=131_072),
    "B = 1": sized(b=1),
    "B = 17": sized(b=17),
    "the first column": with_(y_offset=0),
    "an offset that is no multiple of 16": with_(y_offset=7),
    "the last column": with_(y_offset=32),
    "index W": indexed(1, 4),
    "the least index": indexed(1, -(2**31)),
    "bfloat16": sized(dtype=BFLOAT16),
    "float32": sized(dtype=np.float32),
    "no A": sized(with_a=False),
    "scale as a fraction": with_(scale=Fraction(3, 4)),
}


@every_call
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name, call):
    problem = ACCEPTED[name]()
    got = call(problem | {"out": np.empty_like(problem["y"])})
    assert_right(got, problem | {"scale": float(problem["scale"])})


@pytest.mark.parametrize("size", [-1, 32])
def test_slice_sizes(size):
    problem = base()
    assert_right(one_call(problem | {"y_slice_size": size}), problem)


@every_call
def test_out_right_behind_an_input(call):
    """Memory that touches is not memory that overlaps."""
    problem = shifted(3 * 64)()
    expected = base()
    assert_right(call(problem), expected)


@every_call
@pytest.mark.parametrize("name", ["y", "x", "weight_b", "weight_a", "indices"])
def test_out_in_the_gaps_of_a_strided_input(name, call):
    """The elements of the input lie on both sides of out, none in it."""
    problem = base()
    array = problem[name]
    gap = problem["y"].nbytes
    memory = np.zeros((array.shape[0], array[0].nbytes + gap), np.uint8)
    apart = np.ndarray(
        array.shape, array.dtype, memory, strides=(memory.strides[0], *array.strides[1:])
    )
    apart[...] = array
    out = memory[1, array[0].nbytes :].view(np.float16).reshape(problem["y"].shape)
    assert_right(call(problem | {name: apart, "out": out}), problem)


def test_subclasses_of_ndarray_are_arrays(tmp_path):
    problem = base()
    mapped = np.memmap(tmp_path / "x", np.float16, "w+", shape=problem["x"].shape)
    mapped[...] = problem["x"]
    assert_right(one_call(problem | {"x": mapped}), problem)


# ---- types and values that no rule has a code for ----------------------------------------------


NO_ARRAYS = {
    "list": [[1.0]],
    "tuple": (1, 2),
    "int": 3,
    "str": "y",
    "bytes": b"y",
    "scalar": np.float16(1),
    "buffer": memoryview(b"12"),
    "object": object(),
}


@every_call
@pytest.mark.parametrize("name", ["y", "x", "weight_b", "indices", "weight_a", "out"])
@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_what_is_no_array_is_a_type_error(kind, name, call):
    problem = with_out(base())
    out = problem["out"]
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        call(problem | {name: NO_ARRAYS[kind]})
    assert np.all(out == 1)


@every_call
@pytest.mark.parametrize("name", ["layer_idx", "y_offset", "y_slice_size"])
@pytest.mark.parametrize(
    "value", [True, np.True_, 1.0, np.float32(1), "1", None, [1], 1j, np.array([1])], ids=repr
)
def test_what_is_no_integer_is_a_type_error(value, name, call):
    problem = with_out(base())
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        call(problem | {name: value})
    assert np.all(problem["out"] == 1)


@every_call
@pytest.mark.parametrize("name", ["layer_idx", "y_offset", "y_slice_size"])
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, np.uint64(2**63)], ids=repr)
def test_integers_beyond_64_bits_are_overflow_errors(value, name, call):
    problem = with_out(base())
    with pytest.raises(OverflowError, match=rf"\b{name}\b"):
        call(problem | {name: value})
    assert np.all(problem["out"] == 1)


@every_call
@pytest.mark.parametrize(
    "value", ["1", b"1", None, [1.0], 1j, object()], ids=lambda v: type(v).__name__
)
def test_what_is_no_real_number_is_a_type_error(value, call):
    problem = with_out(base())
    with pytest.raises(TypeError, match=r"\bscale\b"):
        call(problem | {"scale": value})
    assert np.all(problem["out"] == 1)


def test_a_scale_too_large_for_a_float_is_an_overflow_error():
    with pytest.raises(OverflowError):
        one_call(base() | {"scale": 10**400})


@every_call
@pytest.mark.parametrize(
    "name,value,allowed",
    [
        ("backend", "gpu", ["cpu"]),
        ("backend", "", ["cpu"]),
        ("backend", "CPU", ["cpu"]),
        ("limits", "gpu", ["npu", "none"]),
        ("limits", "", ["npu", "none"]),
        ("rounding", "float16", ["float32", "device"]),
        ("rounding", "Device", ["float32", "device"]),
    ],
)
def test_unknown_values_are_value_errors_that_name_the_known(name, value, allowed, call):
    problem = with_out(base())
    with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
        call(problem | {name: value})
    assert not isinstance(caught.value, raw.AddLoraError)
    for known in allowed:
        assert f"{known}" in str(caught.value)
    assert np.all(problem["out"] == 1)


@pytest.mark.parametrize("name", ["limits", "rounding", "backend"])
@pytest.mark.parametrize("value", [1, b"npu", ["npu"]], ids=repr)
def test_options_of_other_types(name, value):
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        one_call(base() | {name: value})


def test_the_cpu_backend_by_name():
    problem = base()
    assert_right(one_call(problem | {"backend": "cpu"}), problem)


# ---- order -------------------------------------------------------------------------------------


def test_an_earlier_check_comes_first():
    """null, dtype, shapes and limits, out's memory, indices: of two faults the earlier is told."""
    faults: list[tuple[int, Problem]] = [
        (NULL, {"x": None}),
        (INVALID, {"weight_b": np.zeros((4, 2, 32, 16), np.float64)}),
        (SHAPE, {"layer_idx": 2}),
        (INVALID, {"out": read_only(base())}),
        (SHAPE, {"indices": np.full(3, 5, np.int32)}),
    ]
    for i, (code, earlier) in enumerate(faults):
        for _, later in faults[i + 1 :]:
            for call in (one_call, first_phase):
                with pytest.raises(raw.AddLoraError) as caught:
                    call(with_out(base() | later | earlier))
                alone = with_out(base() | earlier)
                with pytest.raises(raw.AddLoraError) as expected:
                    call(alone)
                assert caught.value.code == expected.value.code == code
                assert str(caught.value) == str(expected.value)


# ---- the table of rules ------------------------------------------------------------------------


def test_the_table_is_a_tuple_of_records():
    assert isinstance(raw.LIMITS, tuple)
    assert {rule.code for rule in raw.LIMITS} == {NULL, INVALID, SHAPE}
    names = [rule.name for rule in raw.LIMITS]
    assert len(set(names)) == len(names)
    for rule in raw.LIMITS:
        assert isinstance(rule.lifted, bool)
        assert all(
            isinstance(text, str) and text for text in (rule.name, rule.applies_to, rule.rule)
        )


def rules_behind(refusal: Refusal) -> list[str]:
    """The rules that may have refused: of that code, that argument, and as much lifted."""
    return [
        rule.name
        for rule in raw.LIMITS
        if rule.code == refusal.code
        and rule.lifted == refusal.lifted
        and re.search(rf"\b({refusal.argument})\b", rule.applies_to)
    ]


@every_refusal
def test_the_table_has_a_rule_for_each_refusal(refusal):
    assert rules_behind(refusal)


def test_each_rule_of_the_table_is_tested():
    """The rules of workspace and executor are in test_raw_two_phase.py, the NPU's own in test_aclnn.py."""
    tested = {name for refusal in REFUSALS for name in rules_behind(refusal)}
    others = {rule.name for rule in raw.LIMITS if rule.applies_to in ("workspace", "executor")}
    others |= {"device_limits", "device_bank"}
    assert {rule.name for rule in raw.LIMITS} == tested | others


def test_errors():
    assert issubclass(raw.AddLoraError, ValueError)
    assert issubclass(raw.AclError, RuntimeError)
    with pytest.raises(raw.AddLoraError) as caught:
        one_call(base() | {"layer_idx": 2})
    assert isinstance(caught.value.code, int)


# ---- anything ----------------------------------------------------------------------------------


GARBAGE = [
    None, True, -1, 0, 1, 2**70, -(2**70), 0.5, float("nan"), "x", b"", [], {}, object(),
    np.float16(1), np.zeros((), np.float16), np.zeros((0, 0), np.float16), np.zeros((3, 64), ">f2"),
    np.zeros((3, 64), object), np.zeros(3, "M8[s]"), np.zeros((3, 64), [("a", "f2")]),
    np.zeros((3, 64), np.float16)[::-1], np.zeros((64, 3), np.float16).T, np.zeros(3, np.int32),
    np.broadcast_to(np.float16(1), (3, 48)), np.broadcast_to(np.float16(1), (2**57, 16)),
    np.zeros((4, 2, 32, 16), np.float16)[..., ::-1], np.zeros([1] * 32, np.float16),
    np.zeros((4, 2, 16, 48), np.float16), np.zeros((4, 0, 32, 16), np.float16),
    np.full(3, 2**31 - 1, np.int32), np.full(3, -(2**31), np.int32),
]  # fmt: skip
ALLOWED = (ValueError, TypeError, OverflowError, IndexError, MemoryError, raw.AclError)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # by float()
@given(
    st.dictionaries(
        st.sampled_from([*base(), "out", "y_slice_size", "backend", "limits", "rounding"]),
        st.sampled_from(GARBAGE),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([one_call, first_phase]),
)
def test_garbage_is_refused_or_computed(arguments, call):
    problem = with_out(base()) | {name: copied(value) for name, value in arguments.items()}
    out = problem["out"]
    before = out.tobytes() if isinstance(out, np.ndarray) and out.nbytes < 1 << 20 else None
    try:
        got = call(problem)
    except ALLOWED:
        assert before is None or out.tobytes() == before
    else:
        assert isinstance(got, np.ndarray)
        assert out is None or got is out


def copied(value: Any) -> Any:
    """An array that no other example can change."""
    if isinstance(value, np.ndarray) and value.flags.writeable and 0 not in value.strides:
        return value.copy("K")
    return value


def test_an_out_that_does_not_fit_memory_is_a_memory_error():
    """2**55 rows that are one number in memory, and an out that would be 2**62 bytes."""
    rows = 2**55
    problem = base() | {
        "y": np.broadcast_to(np.float16(1), (rows, 64)),
        "x": np.broadcast_to(np.float16(1), (rows, 48)),
        "indices": np.broadcast_to(np.int32(0), rows),
    }
    with pytest.raises(MemoryError):
        one_call(problem)
