"""The same bits for a row: alone, in any batch, in any order, with 1 to 16 threads, from every kernel
set, in one phase or two, in place or not, from raw and from MindSpore in both of its modes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore_addlora import raw
from mindspore_calls import through_mindspore
from recipe import cases, digest_of, problem_of
from reference import (
    DTYPES,
    INDEX_PATTERNS,
    Array,
    Problem,
    assert_right,
    assert_right_device,
    assert_same_bits,
    make_problem,
    written_elements,
)

ORDER = ("y", "x", "weight_b", "indices", "weight_a", "layer_idx", "scale", "y_offset")
FACTOR = int(os.environ.get("ADDLORA_TEST_FACTOR", "1"))


@pytest.fixture(autouse=True)
def the_number_of_threads_is_restored() -> Iterator[None]:
    before = raw.get_num_threads()
    yield
    raw.set_num_threads(before)


# ---- one process for each kernel set -------------------------------------------------------------

# The set is chosen once for a process; this one answers calls until its input ends.
WORKER = """
import pickle, sys
import ml_dtypes  # the dtype of some of the arrays
from mindspore_addlora import raw
while True:
    try: threads, call = pickle.load(sys.stdin.buffer)
    except EOFError: break
    raw.set_num_threads(threads)
    answer = raw.add_lora(**call, limits="none"), raw.last_kernel_set()
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


class KernelSet:
    """A process in which one kernel set is forced."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=os.environ | {"ADDLORA_ISA": name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, problem: Problem, rounding: str, threads: int) -> Array:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((threads, problem | {"rounding": rounding}), self.process.stdin)
        self.process.stdin.flush()
        out, ran = pickle.load(self.process.stdout)
        active = (problem["indices"] >= 0) & (problem["indices"] < len(problem["weight_b"]))
        assert ran == self.name or not active.any()
        return out

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def kernel_sets() -> Iterator[list[KernelSet]]:
    sets = [KernelSet(name) for name in raw.kernel_sets()]
    yield sets
    for kernel_set in sets:
        kernel_set.close()


# ---- fixed inputs --------------------------------------------------------------------------------

CASES = cases()
case_ids = [f"{i}-{case.dtype}-{case.rounding}" for i, case in enumerate(CASES)]
each_case = pytest.mark.parametrize("case", CASES, ids=case_ids)


def test_the_file_has_every_dtype_rounding_and_kind():
    seen = {(case.dtype, case.rounding, case.kind) for case in CASES}
    assert len(seen) == 12  # 3 kinds of float16 with both roundings, and of the other two
    assert len({case.digest for case in CASES}) > 0.9 * len(CASES)
    assert all(written_elements(**problem_of(case)).any() for case in CASES)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # signalling NaN
@each_case
def test_digest(case, kernel_sets):
    """Each kernel set gives the digest; and what has that digest is right."""
    problem = problem_of(case)
    for kernel_set in kernel_sets:
        for threads in (1, 2, 16):
            out = kernel_set(problem, case.rounding, threads)
            assert digest_of(out) == case.digest, (kernel_set.name, threads)
    (assert_right if case.rounding == "float32" else assert_right_device)(out, problem)


def test_a_changed_bit_changes_the_digest():
    out = raw.add_lora(**problem_of(CASES[5]), limits="none", rounding=CASES[5].rounding)
    flat = out.view(np.uint16).reshape(-1)
    for position in (0, flat.size // 2, flat.size - 1):
        changed = flat.copy()
        changed[position] ^= 1
        assert digest_of(changed) != digest_of(flat)
    assert digest_of(flat[::-1]) != digest_of(flat)


# ---- any problem ---------------------------------------------------------------------------------


@st.composite
def problems(draw: Any, *, most_rows: int = 40) -> tuple[Problem, str]:
    """A problem of any shape and dtype, and a rounding that its dtype has."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    width = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 255, 257, 512, 513, 1030]))
    h2 = draw(width)
    y_offset = draw(st.integers(0, 20))
    problem = make_problem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        b=draw(st.integers(1, most_rows)),
        h1=draw(width),
        h2=h2,
        h3=y_offset + h2 + draw(st.integers(0, 20)),
        r=draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 128, 130]))),
        w=draw(st.integers(1, 6)),
        l=2,
        dtype=DTYPES[dtype],
        with_a=draw(st.booleans()),
        indices=draw(st.sampled_from(INDEX_PATTERNS)),
        layer_idx=draw(st.integers(0, 1)),
        scale=draw(st.sampled_from([0.0, 1.0, -0.75, 3.0, 1e-3])),
        y_offset=y_offset,
    )
    roundings = ["float32", "device"] if dtype == "float16" else ["float32"]
    return problem, draw(st.sampled_from(roundings))


THREADS = st.integers(1, 16)


def rows_of(problem: Problem, rows: Array) -> Problem:
    return problem | {name: problem[name][rows] for name in ("y", "x", "indices")}


@given(problems(), THREADS, st.randoms(use_true_random=False))
def test_a_row_alone_in_any_batch_and_in_any_order(both, threads, random):
    problem, rounding = both
    options = {"limits": "none", "rounding": rounding}
    raw.set_num_threads(1)
    expected = raw.add_lora(**problem, **options)
    b = len(expected)
    raw.set_num_threads(threads)
    shuffled = random.sample(range(b), b)
    repeated = [random.randrange(b) for _ in range(random.randrange(1, 3 * b + 1))]
    alone = [[random.randrange(b)] for _ in range(3)]
    for rows in (shuffled, repeated, *alone):
        got = raw.add_lora(**rows_of(problem, np.array(rows)), **options)
        assert_same_bits(got, expected[rows], f"rows {rows}")


@given(problems(), THREADS, THREADS)
def test_every_kernel_set_with_any_number_of_threads(kernel_sets, both, few, many):
    problem, rounding = both
    expected = kernel_sets[-1](problem, rounding, 1)
    for kernel_set in kernel_sets:
        for threads in (few, many):
            got = kernel_set(problem, rounding, threads)
            assert_same_bits(got, expected, f"{kernel_set.name}, {threads} threads")


@given(problems(), THREADS)
def test_two_phases_and_in_place(both, threads):
    problem, rounding = both
    options = {"limits": "none", "rounding": rounding}
    raw.set_num_threads(1)
    expected = raw.add_lora(**problem, **options)
    raw.set_num_threads(threads)
    out = np.empty_like(expected)
    arguments = [problem[name] for name in ORDER]
    size, executor = raw.add_lora_get_workspace_size(*arguments, -1, out, **options)
    raw.add_lora_execute(bytearray(size), executor)
    assert_same_bits(out, expected, "two phases")
    y = problem["y"].copy()
    raw.add_lora(**problem | {"y": y}, out=y, **options)
    assert_same_bits(y, expected, "in place")


# ---- MindSpore -----------------------------------------------------------------------------------


both_modes = pytest.mark.parametrize(
    "mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"]
)


@both_modes
@pytest.mark.parametrize("case", CASES[::3], ids=case_ids[::3])
def test_digest_through_mindspore(case, mode):
    out = through_mindspore(problem_of(case), case.rounding, mode)
    assert digest_of(out) == case.digest


@both_modes
@settings(max_examples=40 * FACTOR)
@given(both=problems(most_rows=12), threads=THREADS)
def test_raw_and_mindspore(mode, both, threads):
    problem, rounding = both
    raw.set_num_threads(1)
    expected = raw.add_lora(**problem, limits="none", rounding=rounding)
    raw.set_num_threads(threads)
    assert_same_bits(through_mindspore(problem, rounding, mode), expected)
