"""The two phases: what an executor holds, how often it runs, what a workspace must be."""

from __future__ import annotations

import array
import gc
import mmap
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

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
    assert_right,
    assert_right_device,
    assert_same_bits,
    make_problem,
)

NULL, INVALID, SHAPE = 161001, 161002, 561002


def plan(problem: Problem, out: Array, **options: Any) -> tuple[int, raw.Executor]:
    return raw.add_lora_get_workspace_size(
        problem["y"],
        problem["x"],
        problem["weight_b"],
        problem["indices"],
        problem["weight_a"],
        problem["layer_idx"],
        problem["scale"],
        problem["y_offset"],
        -1,
        out,
        **options,
    )


def base(seed: int = 1, **sizes: Any) -> Problem:
    return make_problem(np.random.default_rng(seed), **({"indices": "repeated_apart"} | sizes))


def assert_refused(code: int, *patterns: str, call: Callable[[], Any]) -> None:
    with pytest.raises(raw.AddLoraError) as caught:
        call()
    assert caught.value.code == code, caught.value
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern} is not in: {caught.value}"


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("b", [1, 6, 70])
def test_the_two_phases_are_the_one_call(b, with_a, dtype):
    problem = base(b=b, with_a=with_a, dtype=DTYPES[dtype])
    out = np.full_like(problem["y"], np.nan)
    size, executor = plan(problem, out)
    assert isinstance(size, int)
    assert isinstance(executor, raw.Executor)
    assert np.isnan(out.astype(np.float32)).all(), "the first phase wrote"
    assert raw.add_lora_execute(bytearray(size), executor) is None
    assert_right(out, problem)
    assert_same_bits(out, raw.add_lora(**problem))


def test_in_place():
    problem = base()
    y = problem["y"].copy()
    size, executor = plan(problem | {"y": y}, y)
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(y, problem)


def test_options_reach_the_first_phase():
    problem = base(h1=33, r=5)
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out, limits="none", rounding="device", backend="cpu")
    raw.add_lora_execute(bytearray(size), executor)
    assert_right_device(out, problem)
    assert_refused(SHAPE, r"\b(weight_b|x)\b", call=lambda: plan(problem, out))


def test_the_stream_is_not_used_on_the_cpu():
    problem = base()
    out = np.empty_like(problem["y"])
    for stream in (None, 0, 7):
        size, executor = plan(problem, out)
        raw.add_lora_execute(bytearray(size), executor, stream)
        assert_right(out, problem)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(INDEX_PATTERNS),
    st.integers(0, 40),
    st.integers(1, 70),
    st.integers(1, 40),
    st.booleans(),
)
def test_any_problem_in_a_workspace_of_nan(seed, pattern, b, h1, r, with_a):
    """Scratch that nothing wrote is not read: all bytes are ones, NaN in every dtype."""
    problem = base(seed, b=b, h1=h1, r=r, with_a=with_a, indices=pattern)
    out = np.full_like(problem["y"], np.nan)
    size, executor = plan(problem, out, limits="none")
    raw.add_lora_execute(bytearray(b"\xff" * size) if size else None, executor)
    assert_right(out, problem)


def test_nothing_is_written_beyond_the_workspace():
    problem = base(b=70, h1=100, r=40)
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out, limits="none")
    memory = np.full(size + 512, 0xA5, np.uint8)
    for begin in range(256, 256 + 64):
        executor = plan(problem, out, limits="none")[1]
        raw.add_lora_execute(memory[begin : begin + size], executor)
        assert np.all(memory[:begin] == 0xA5)
        assert np.all(memory[begin + size :] == 0xA5)
        memory[:] = 0xA5
        assert_right(out, problem)


def test_an_empty_batch_needs_no_workspace():
    problem = base(b=0)
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    assert size == 0
    raw.add_lora_execute(None, executor)
    assert_refused(INVALID, "executor", call=lambda: raw.add_lora_execute(None, executor))


def test_the_size_does_not_depend_on_the_indices():
    """Phase one may be asked once for a batch whose routing changes."""
    sizes = set()
    for pattern in INDEX_PATTERNS:
        problem = base(b=50, indices=pattern)
        sizes.add(plan(problem, np.empty_like(problem["y"]))[0])
    assert len(sizes) == 1


# ---- workspace ---------------------------------------------------------------------------------


WORKSPACES: dict[str, Callable[[int], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda size: memoryview(bytearray(size)),
    "larger": lambda size: bytearray(size + 1000),
    "unaligned": lambda size: memoryview(bytearray(size + 3))[3:],
    "uint8": lambda size: np.zeros(size, np.uint8),
    "float64": lambda size: np.full(size // 8 + 1, np.nan),
    "float16": lambda size: np.full(size // 2 + 1, np.nan, np.float16),
    "2-D": lambda size: np.zeros((2, size), np.int8),
    "array.array": lambda size: array.array("d", [0.0] * (size // 8 + 1)),
    "mmap": lambda size: mmap.mmap(-1, size),
}


@pytest.mark.parametrize("kind", WORKSPACES)
def test_workspaces(kind):
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    raw.add_lora_execute(WORKSPACES[kind](size), executor)
    assert_right(out, problem)


REFUSED_WORKSPACES: dict[str, tuple[int, list[str], Callable[[int], Any]]] = {
    "None": (NULL, [r"{size}", "None"], lambda size: None),
    "a byte too small": (INVALID, [r"{size}", r"{less}"], lambda size: bytearray(size - 1)),
    "empty": (INVALID, [r"{size}", r"\b0\b"], lambda size: bytearray()),
    "an empty array": (INVALID, [r"{size}", r"\b0\b"], lambda size: np.zeros(0)),
    "bytes": (INVALID, ["writ", "read-only|not writ"], bytes),
    "a read-only view": (
        INVALID,
        ["writ", "read-only|not writ"],
        lambda size: memoryview(bytearray(size)).toreadonly(),
    ),
    "a read-only array": (
        INVALID,
        ["writ", "read-only|not writ"],
        lambda size: np.frombuffer(bytes(size), np.uint8),
    ),
    "strided": (INVALID, ["contiguous"], lambda size: np.zeros(2 * size, np.uint8)[::2]),
    "in Fortran order": (INVALID, ["contiguous"], lambda size: np.zeros((size, 2), np.uint8, "F")),
}


@pytest.mark.parametrize("kind", REFUSED_WORKSPACES)
def test_a_refused_workspace_does_not_spend_the_executor(kind):
    problem = base()
    out = np.full_like(problem["y"], 1)
    size, executor = plan(problem, out)
    code, patterns, make = REFUSED_WORKSPACES[kind]
    patterns = [
        pattern.format(size=rf"\b{size}\b", less=rf"\b{size - 1}\b") for pattern in patterns
    ]
    workspace = make(size)
    for _ in range(2):
        assert_refused(
            code,
            r"\bworkspace\b",
            *patterns,
            call=lambda: raw.add_lora_execute(workspace, executor),
        )
        assert np.all(out == 1)
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)


@pytest.mark.parametrize("name", ["y", "x", "weight_b", "weight_a", "indices", "out"])
def test_a_workspace_that_overlaps_a_tensor_is_refused(name):
    problem = base()
    out = np.zeros_like(problem["y"])
    size = plan(problem, out)[0]
    tensors = problem | {"out": out}
    tensor = tensors[name]
    memory = np.zeros(size + tensor.nbytes, np.uint8)
    inside = memory[-tensor.nbytes :].view(tensor.dtype).reshape(tensor.shape)
    inside[...] = tensor
    tensors[name] = inside
    _, executor = plan(tensors, tensors.pop("out"))
    before = memory.copy()
    overlapping = memory[: size + 1]
    assert_refused(
        INVALID,
        r"\bworkspace\b",
        rf"\b{name}\b",
        call=lambda: raw.add_lora_execute(overlapping, executor),
    )
    np.testing.assert_array_equal(memory, before)
    raw.add_lora_execute(memory[:size], executor)  # which ends where the tensor begins


@pytest.mark.parametrize(
    "workspace", [5, "text", [1, 2], object(), 1.5], ids=lambda w: type(w).__name__
)
def test_what_is_no_buffer_is_a_type_error(workspace):
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    with pytest.raises(TypeError, match="workspace"):
        raw.add_lora_execute(workspace, executor)
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)


def test_a_workspace_is_released():
    """The buffer is held for the run alone: a bytearray that is exported cannot be resized."""
    problem = base()
    size, executor = plan(problem, np.empty_like(problem["y"]))
    workspace = bytearray(size)
    raw.add_lora_execute(workspace, executor)
    workspace.extend(b"more")
    assert len(workspace) == size + 4
    with pytest.raises(raw.AddLoraError):
        raw.add_lora_execute(workspace, executor)
    workspace.extend(b"more")
    assert len(workspace) == size + 8


def test_one_workspace_serves_calls_one_after_another():
    problems = [base(seed, b=b) for seed, b in enumerate((30, 1, 17))]
    outs = [np.empty_like(problem["y"]) for problem in problems]
    plans = [plan(problem, out) for problem, out in zip(problems, outs, strict=True)]
    workspace = bytearray(max(size for size, _ in plans))
    for _, executor in plans:
        raw.add_lora_execute(workspace, executor)
    for problem, out in zip(problems, outs, strict=True):
        assert_right(out, problem)


# ---- executor ----------------------------------------------------------------------------------


def test_an_executor_runs_once():
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    raw.add_lora_execute(bytearray(size), executor)
    out[:] = 1
    for _ in range(2):
        assert_refused(
            INVALID,
            r"\bexecutor\b",
            "spent|run",
            call=lambda: raw.add_lora_execute(bytearray(size), executor),
        )
    assert np.all(out == 1)


def test_in_place_runs_once():
    """A second run would add twice."""
    problem = base()
    y = problem["y"].copy()
    size, executor = plan(problem | {"y": y}, y)
    raw.add_lora_execute(bytearray(size), executor)
    assert_refused(
        INVALID, r"\bexecutor\b", call=lambda: raw.add_lora_execute(bytearray(size), executor)
    )
    assert_right(y, problem)


def test_no_executor():
    assert_refused(
        NULL, r"\bexecutor\b", r"\bNone\b", call=lambda: raw.add_lora_execute(bytearray(8), None)
    )


@pytest.mark.parametrize(
    "executor", [1, "executor", object(), np.zeros(3)], ids=lambda e: type(e).__name__
)
def test_what_is_no_executor_is_a_type_error(executor):
    with pytest.raises(TypeError, match="executor"):
        raw.add_lora_execute(bytearray(8), executor)


def test_executors_are_made_by_the_first_phase_only():
    with pytest.raises(TypeError):
        raw.Executor()


def test_an_executor_keeps_its_arrays_alive():
    problem = base(b=20)
    expected = problem | {"y": problem["y"].copy()}
    out = np.full_like(problem["y"], np.nan)
    names = ("y", "x", "weight_b", "indices", "weight_a")
    copies = {name: problem[name].copy() for name in names}
    alive = [weakref.ref(array) for array in copies.values()]
    out_alive = weakref.ref(out)
    size, executor = plan(problem | copies, out)
    view = out[:]
    del copies, out
    gc.collect()
    assert all(reference() is not None for reference in alive)
    # What would take freed memory over.
    garbage = [np.full(expected["weight_b"].size, np.nan, np.float16) for _ in range(50)]
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(view.copy(), expected)
    del executor, view, garbage
    gc.collect()
    assert all(reference() is None for reference in alive)
    assert out_alive() is None


def test_an_executor_that_never_runs_lets_go():
    problem = base()
    out = np.empty_like(problem["y"])
    alive = weakref.ref(out)
    executor = plan(problem, out)[1]
    del out
    assert alive() is not None
    del executor
    gc.collect()
    assert alive() is None


def test_arrays_are_read_when_it_runs():
    """Values that change between the phases count; so does an index that has gone bad."""
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    problem["x"] *= -1
    problem["y"] += 1
    problem["indices"][:] = [3, -1, 4, 0, 2, 0]
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)


def test_an_index_that_goes_bad_between_the_phases():
    problem = base()
    out = np.full_like(problem["y"], 1)
    size, executor = plan(problem, out)
    problem["indices"][4] = 9
    assert_refused(
        SHAPE,
        r"\bindices\b",
        r"\b9\b.*\b4\b",
        call=lambda: raw.add_lora_execute(bytearray(size), executor),
    )
    assert np.all(out == 1)
    problem["indices"][4] = 0
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)


def test_an_out_that_becomes_read_only_between_the_phases():
    problem = base()
    out = np.full_like(problem["y"], 1)
    size, executor = plan(problem, out)
    out.flags.writeable = False
    assert_refused(
        INVALID, r"\bout\b", call=lambda: raw.add_lora_execute(bytearray(size), executor)
    )
    assert np.all(out == 1)
    out.flags.writeable = True
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)


def test_threads_that_share_an_executor_spend_it_once():
    problem = base(b=200, h1=256)
    y = problem["y"].copy()
    size, executor = plan(problem | {"y": y}, y)
    start = threading.Barrier(4)
    results: list[object] = []

    def run() -> None:
        workspace = bytearray(size)
        start.wait()
        try:
            raw.add_lora_execute(workspace, executor)
            results.append("ran")
        except raw.AddLoraError as error:
            results.append(error.code)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results, key=str) == [INVALID, INVALID, INVALID, "ran"]
    assert_right(y, problem)


# ---- repeatable --------------------------------------------------------------------------------


def test_a_repeatable_executor_reads_its_arrays_afresh():
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    executor.set_repeatable()
    rng = np.random.default_rng(2)
    for _ in range(5):
        for name in ("y", "x", "weight_b", "weight_a"):
            array = problem[name]
            array[...] = rng.standard_normal(array.shape).astype(array.dtype)
        problem["indices"][:] = rng.integers(-1, 5, 6)
        raw.add_lora_execute(bytearray(size), executor)
        assert_right(out, problem)


def test_a_repeatable_executor_in_place_adds_again():
    problem = base()
    y = problem["y"].copy()
    size, executor = plan(problem | {"y": y}, y)
    executor.set_repeatable()
    expected = problem["y"]
    for _ in range(3):
        raw.add_lora_execute(bytearray(size), executor)
        expected = raw.add_lora(**problem | {"y": expected})
        assert_same_bits(y, expected)


def test_a_repeatable_executor_checks_the_indices_at_each_run():
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    executor.set_repeatable()
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)
    good = int(problem["indices"][2])
    problem["indices"][2] = 5
    before = out.copy()
    for _ in range(2):
        assert_refused(
            SHAPE,
            r"\bindices\b",
            r"\b5\b.*\b2\b",
            call=lambda: raw.add_lora_execute(bytearray(size), executor),
        )
        assert_same_bits(out, before)
    problem["indices"][2] = good
    out[:] = 0
    raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)


def test_set_repeatable_after_a_run_is_refused():
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    raw.add_lora_execute(bytearray(size), executor)
    assert_refused(INVALID, r"\bexecutor\b", "set_repeatable", call=executor.set_repeatable)
    assert_refused(
        INVALID, r"\bexecutor\b", call=lambda: raw.add_lora_execute(bytearray(size), executor)
    )


def test_set_repeatable_may_be_called_again_before_a_run():
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    executor.set_repeatable()
    executor.set_repeatable()
    for _ in range(2):
        out[:] = 0
        raw.add_lora_execute(bytearray(size), executor)
        assert_right(out, problem)


def test_set_repeatable_works_after_a_refused_run():
    problem = base()
    out = np.empty_like(problem["y"])
    size, executor = plan(problem, out)
    assert_refused(NULL, "workspace", call=lambda: raw.add_lora_execute(None, executor))
    executor.set_repeatable()
    for _ in range(2):
        raw.add_lora_execute(bytearray(size), executor)
    assert_right(out, problem)


def test_a_repeatable_empty_batch():
    problem = base(b=0)
    size, executor = plan(problem, np.empty_like(problem["y"]))
    executor.set_repeatable()
    assert size == 0
    for _ in range(3):
        assert raw.add_lora_execute(None, executor) is None
    assert raw.add_lora_execute(bytearray(10), executor) is None


def test_executors_do_not_share_state():
    problem = base()
    first, second = np.zeros_like(problem["y"]), np.zeros_like(problem["y"])
    size, one = plan(problem, first)
    _, other = plan(problem, second)
    raw.add_lora_execute(bytearray(size), other)
    assert np.all(first == 0)
    raw.add_lora_execute(bytearray(size), one)
    assert_same_bits(first, second)


def test_a_workspace_of_python_objects_is_refused():
    y, x = np.zeros((2, 16), np.float16), np.ones((2, 16), np.float16)
    b, indices = np.ones((1, 1, 16, 16), np.float16), np.zeros(2, np.int32)
    size, executor = raw.add_lora_get_workspace_size(
        y, x, b, indices, None, 0, 1.0, 0, -1, np.empty_like(y)
    )
    workspace = np.empty(size, object)
    with pytest.raises(raw.AddLoraError, match="workspace: .*objects") as refused:
        raw.add_lora_execute(workspace, executor)
    assert refused.value.code == 161002
    assert all(value is None for value in workspace[:100])


def test_a_rank_without_end_is_a_memory_error():
    rank = -(-(2**64) // 1028) + 100000  # its workspace wraps to a few bytes in 64 bits
    y = np.zeros((1, 1), np.float16)
    x = np.broadcast_to(np.float16(1), (1, rank))
    b = np.broadcast_to(np.float16(1), (1, 1, 1, rank))
    with pytest.raises(MemoryError):
        raw.add_lora_get_workspace_size(
            y, x, b, np.zeros(1, np.int32), None, 0, 1.0, 0, -1, np.zeros_like(y), limits="none"
        )


def test_indices_that_another_thread_changes_do_no_harm():
    import threading

    rows = 20000
    y, x = np.zeros((rows, 16), np.float16), np.ones((rows, 16), np.float16)
    b, indices = np.ones((8, 1, 16, 16), np.float16), np.zeros(rows, np.int32)
    stop = threading.Event()

    def change():
        values = [np.full(rows, v, np.int32) for v in (0, 7, -1)]
        while not stop.is_set():
            for value in values:
                indices[:] = value

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            out = raw.add_lora(y, x, b, indices)
            # Each row has the whole of an adapter, or none.
            assert np.isin(out, (0, 16)).all()
    finally:
        stop.set()
        thread.join()
