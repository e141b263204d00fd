"""Every kernel set that this CPU has: the forced one runs, and all give the same bits.

A kernel set is chosen once for a process, so each runs this file as a script in a process of its
own: it computes all cases, and the tests compare what it saved.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore_addlora import raw
from reference import (
    DTYPES,
    Array,
    Problem,
    active_rows,
    assert_right,
    assert_right_device,
    bits,
    make_exact_problem,
    make_problem,
    written_elements,
)

KNOWN = ("scalar", "avx2", "avx512", "neon")
EDGES = (1, 8, 15, 16, 17, 31, 33, 64, 127, 129)


# ---- the cases ---------------------------------------------------------------------------------


def small_cases() -> Iterator[tuple[str, Problem]]:
    for dtype_name, dtype in DTYPES.items():
        for i, n in enumerate(EDGES):
            rng = np.random.default_rng(i)
            sizes: dict[str, Any] = {
                "b": 5 + 3 * i,
                "dtype": dtype,
                "h3": 200,
                "with_a": i % 4 != 3,
            }
            yield f"{dtype_name} h1={n}", make_problem(rng, h1=n, h2=24, r=11, **sizes)
            yield f"{dtype_name} h2={n}", make_problem(rng, h1=40, h2=n, r=16, **sizes)
            yield f"{dtype_name} r={n}", make_problem(rng, h1=50, h2=30, r=n, **sizes)
            yield f"{dtype_name} exact {n}", make_exact_problem(rng, h1=n, h2=n, r=n, **sizes)


def larger_cases() -> Iterator[tuple[str, Problem]]:
    for dtype_name, dtype in DTYPES.items():
        rng = np.random.default_rng(99)
        sizes: dict[str, Any] = {"h1": 1040, "h2": 700, "h3": 720, "w": 5, "dtype": dtype}
        yield f"{dtype_name} many rows", make_problem(rng, b=300, r=16, **sizes)
        yield f"{dtype_name} large rank", make_problem(rng, b=20, r=150, **sizes)
        yield f"{dtype_name} one row", make_problem(rng, b=1, r=64, indices="one", **sizes)


def special_cases() -> Iterator[tuple[str, Problem]]:
    """Subnormals, infinities, NaN, overflow, and all bit patterns."""
    for dtype_name, dtype in DTYPES.items():
        rng = np.random.default_rng(7)
        tiny = {"float16": 2.0**-20, "bfloat16": 2.0**-129, "float32": 2.0**-145}[dtype_name]
        problem = make_problem(rng, b=20, h1=33, h2=37, h3=64, r=17, dtype=dtype)
        with np.errstate(all="ignore"):
            small = {
                name: (problem[name] * dtype(tiny)).astype(dtype) for name in ("y", "weight_b")
            }
            huge = (problem["x"] * dtype(3e4)).astype(dtype)
        yield f"{dtype_name} subnormal", problem | small | {"scale": 1.0}
        yield f"{dtype_name} overflow", problem | {"x": huge, "scale": 1e6}
        for name in ("x", "weight_a", "weight_b", "y"):
            unsigned = bits(problem[name]).dtype
            anything = rng.integers(0, np.iinfo(unsigned).max, problem[name].shape, unsigned, True)
            yield f"{dtype_name} any bits of {name}", problem | {name: anything.view(dtype)}
        # A NaN of all ones would turn into zero where it was rounded as a number is.
        full_nan = float(np.array(2**63 - 1).view(np.float64))
        for i, scale in enumerate((np.nan, full_nan, -full_nan, np.inf, 0.0, -0.0, 1e-30)):
            yield f"{dtype_name} scale={scale} {i}", problem | {"scale": scale}


def strided_cases() -> Iterator[tuple[str, Problem]]:
    for name, problem in small_cases():
        strided = dict(problem)
        for argument in ("y", "x", "weight_b", "weight_a", "indices"):
            array = problem[argument]
            if array is not None:
                wide = np.zeros((*array.shape, 3), array.dtype)
                wide[..., 1] = array
                strided[argument] = wide[..., 1]
        yield name, strided


def roundings(problem: Problem) -> tuple[str, ...]:
    return ("float32", "device") if problem["y"].dtype == np.float16 else ("float32",)


def all_cases() -> Iterator[tuple[str, Problem, str]]:
    for cases in (small_cases, larger_cases, special_cases):
        for name, problem in cases():
            for rounding in roundings(problem):
                yield f"{name} {rounding}", problem, rounding


# ---- memory with edges -------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
PROT_NONE, PROT_READ = 0, 1


def protect(memory: mmap.mmap, begin: int, size: int, protection: int) -> None:
    """What lies there is not to be touched from now on: an access ends the process."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + begin
    pointer, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    if libc.mprotect(pointer, length, ctypes.c_int(protection)) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def between_guards(array: Array, at_end: bool) -> Array:
    """A copy that ends where a page begins that may not be touched, or begins where one ends."""
    page = mmap.PAGESIZE
    inside = -(-max(array.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    protect(memory, 0, page, PROT_NONE)
    protect(memory, page + inside, page, PROT_NONE)
    offset = page + (inside - array.nbytes if at_end else 0)
    copy = np.ndarray(array.shape, array.dtype, memory, offset=offset)
    copy[...] = array
    return copy


def run_between_guards(problem: Problem, rounding: str, at_end: bool) -> Array:
    guarded = {
        name: between_guards(value, at_end) if isinstance(value, np.ndarray) else value
        for name, value in problem.items()
    }
    out = between_guards(np.zeros_like(problem["y"]), at_end)
    return raw.add_lora(**guarded, out=out, limits="none", rounding=rounding).copy()


def run_with_unused_memory_protected(dtype: Any) -> Array:
    """Adapters, layers and rows of x that no row uses lie in pages that may not be read."""
    rng = np.random.default_rng(3)
    indices = np.array([1, -1, 3, 4, 1], np.int32)
    width = mmap.PAGESIZE // np.dtype(dtype).itemsize
    # A row of x, and each layer's B, is one page; each layer's A is 16.
    problem = make_problem(
        rng, b=5, h1=width, h2=width // 16, h3=width, r=16, indices=indices, dtype=dtype
    )
    unused_rows = np.setdiff1d(np.arange(5), active_rows(indices, 4))
    moved = dict(problem)
    for name in ("x", "weight_a", "weight_b"):
        array = problem[name]
        memory = mmap.mmap(-1, array.nbytes)
        moved[name] = np.ndarray(array.shape, dtype, memory)
        moved[name][...] = array
        strides = array.strides
        if name == "x":
            for row in unused_rows:
                protect(memory, int(row) * strides[0], strides[0], PROT_NONE)
        else:
            for adapter in range(4):
                for layer in range(2):
                    if adapter not in (1, 3) or layer != problem["layer_idx"]:
                        begin = adapter * strides[0] + layer * strides[1]
                        protect(memory, begin, strides[1], PROT_NONE)
    got = raw.add_lora(**moved, limits="none")
    expected = raw.add_lora(**problem, limits="none")
    np.testing.assert_array_equal(bits(got), bits(expected))
    return got


# ---- the floating-point mode of the host --------------------------------------------------------

FLUSH_TO_ZERO = 0x8040  # MXCSR: flush to zero, and denormals are zero
HAS_MXCSR = platform.machine() in ("x86_64", "AMD64") and platform.libc_ver()[0] == "glibc"
MXCSR_OFFSET = 28  # in glibc's fenv_t


def mxcsr(change: int | None = None) -> int:
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint32 * 8)()
    libm.fegetenv(environment)
    before = environment[MXCSR_OFFSET // 4]
    if change is not None:
        environment[MXCSR_OFFSET // 4] = change
        libm.fesetenv(environment)
    return before


@contextmanager
def flush_to_zero() -> Iterator[None]:
    """As a host does that was compiled with -ffast-math."""
    before = mxcsr(mxcsr() | FLUSH_TO_ZERO)
    try:
        yield
        assert mxcsr() & FLUSH_TO_ZERO == FLUSH_TO_ZERO, "the caller's mode was changed"
    finally:
        mxcsr(before)


# ---- the script --------------------------------------------------------------------------------


def main(path: str) -> None:
    results: dict[str, Array] = {}
    for name, problem, rounding in all_cases():
        results[name] = raw.add_lora(**problem, limits="none", rounding=rounding)
        results[f"ran/{name}"] = np.array(raw.last_kernel_set() or "")
    for name, problem in strided_cases():
        results[f"strided/{name}"] = raw.add_lora(**problem, limits="none")
    for name, problem in small_cases():
        for rounding in roundings(problem):
            for at_end in (True, False):
                got = run_between_guards(problem, rounding, at_end)
                results[f"guarded {at_end}/{name} {rounding}"] = got
    for name, dtype in DTYPES.items():
        results[f"protected/{name}"] = run_with_unused_memory_protected(dtype)
    if HAS_MXCSR:
        for name, problem, rounding in all_cases():
            with flush_to_zero():
                got = raw.add_lora(**problem, limits="none", rounding=rounding)
            results[f"flushed/{name}"] = got
    # Nothing changes the choice once it was made.
    for other in KNOWN:
        os.environ["ADDLORA_ISA"] = other
        raw.add_lora(**make_problem(np.random.default_rng(0), indices="one"))
        results[f"later/{other}"] = np.array(raw.last_kernel_set())
    # numpy's files do not know bfloat16.
    saved = {k: v if v.dtype.kind == "U" else bits(v) for k, v in results.items()}
    np.savez(path, detail=np.array(raw.backends()["cpu"].detail), **saved)


# ---- the tests ---------------------------------------------------------------------------------


def run_script(directory: Path, **environment: str) -> dict[str, Array]:
    path = directory / "results.npz"
    subprocess.run(
        [sys.executable, __file__, str(path)],
        env=os.environ | environment,
        cwd=directory,
        check=True,
        timeout=300,
    )
    with np.load(path) as saved:
        return dict(saved)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Array]]:
    return {
        name: run_script(tmp_path_factory.mktemp(name), ADDLORA_ISA=name)
        for name in raw.kernel_sets()
    }


every_set = pytest.mark.parametrize("kernel_set", raw.kernel_sets())


def part(results: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}


def same(got: Array, expected: Array, problem: Problem) -> bool:
    """The same bits; of NaN that was computed only the place counts."""
    dtype = problem["y"].dtype
    written = written_elements(**problem)
    both_nan = np.isnan(got.view(dtype).astype(np.float32)) & np.isnan(
        expected.view(dtype).astype(np.float32)
    )
    return bool(np.all((got == expected) | (written & both_nan)))


def test_what_this_cpu_has():
    sets = raw.kernel_sets()
    assert isinstance(sets, tuple)
    assert sets[-1] == "scalar"
    assert set(sets) <= set(KNOWN)
    assert len(set(sets)) == len(sets)


def test_the_sets_are_those_that_the_cpu_can_run():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if platform.machine() == "x86_64":
        avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
        expected = ["avx512"] * avx512 + ["avx2"] * ({"avx2", "fma", "f16c"} <= flags)
        assert raw.kernel_sets() == (*expected, "scalar")
    else:
        assert "avx2" not in raw.kernel_sets()
        assert "avx512" not in raw.kernel_sets()


@every_set
def test_the_forced_set_runs(kernel_set, results):
    ran = part(results[kernel_set], "ran/")
    assert len(ran) > 150
    assert set(map(str, ran.values())) == {kernel_set}
    assert kernel_set in str(results[kernel_set]["detail"])


@every_set
def test_the_choice_is_made_once(kernel_set, results):
    later = part(results[kernel_set], "later/")
    assert len(later) == len(KNOWN)
    assert set(map(str, later.values())) == {kernel_set}


def test_the_best_runs_where_none_is_forced(tmp_path):
    script = (
        "import numpy as np\nfrom mindspore_addlora import raw\n"
        "one = np.ones((1, 16), np.float16)\n"
        "assert raw.last_kernel_set() is None, raw.last_kernel_set()\n"
        "raw.add_lora(one, one, np.ones((1, 1, 16, 16), np.float16), np.zeros(1, np.int32))\n"
        "print(raw.last_kernel_set(), raw.backends()['cpu'].detail)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ADDLORA_ISA"}
    for forced in ({}, {"ADDLORA_ISA": ""}):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment | forced,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        ran, detail = done.stdout.split(maxsplit=1)
        assert ran == raw.kernel_sets()[0]
        assert ran in detail


@every_set
def test_the_results_are_right(kernel_set, results):
    for name, problem, rounding in all_cases():
        if any(word in name for word in ("overflow", "any bits", "scale=")):
            continue  # compared with each other below: the oracle knows no overflow inside sums
        got = results[kernel_set][name].view(problem["y"].dtype)
        if rounding == "device":
            if "subnormal" not in name:
                assert_right_device(got, problem)
        else:
            assert_right(got, problem)


@every_set
def test_a_scale_of_nan_gives_nan(kernel_set, results):
    nan_cases = 0
    for name, problem, _ in all_cases():
        if np.isnan(problem["scale"]):
            nan_cases += 1
            got = results[kernel_set][name].view(problem["y"].dtype)
            written = written_elements(**problem)
            assert np.isnan(got.astype(np.float32))[written].all(), name
    assert nan_cases == 12


def test_all_sets_give_the_same_bits(results):
    expected = results["scalar"]
    for kernel_set in raw.kernel_sets():
        got = results[kernel_set]
        assert got.keys() == expected.keys()
        different = [
            name for name, problem, _ in all_cases() if not same(got[name], expected[name], problem)
        ]
        assert not different, kernel_set


@every_set
def test_strides_do_not_change_a_bit(kernel_set, results):
    strided = part(results[kernel_set], "strided/")
    for name, problem in small_cases():
        assert same(strided[name], results[kernel_set][f"{name} float32"], problem), name


@every_set
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_beyond_an_array_is_touched(kernel_set, at_end, results):
    """Each array ends, or begins, at a page that may not be read or written."""
    guarded = part(results[kernel_set], f"guarded {at_end}/")
    assert len(guarded) == sum(len(roundings(problem)) for _, problem in small_cases())
    for name, problem in small_cases():
        for rounding in roundings(problem):
            case = f"{name} {rounding}"
            assert same(guarded[case], results[kernel_set][case], problem), case


@every_set
def test_nothing_unused_is_read(kernel_set, results):
    """Unused adapters, other layers and base rows of x: reading one would end the process."""
    assert part(results[kernel_set], "protected/").keys() == DTYPES.keys()
    for dtype in DTYPES:
        got = results[kernel_set][f"protected/{dtype}"]
        np.testing.assert_array_equal(got, results["scalar"][f"protected/{dtype}"])


@pytest.mark.skipif(not HAS_MXCSR, reason="sets MXCSR through glibc's fenv_t")
@every_set
def test_a_host_that_flushes_to_zero_changes_no_bit(kernel_set, results):
    flushed = part(results[kernel_set], "flushed/")
    different = [
        name
        for name, problem, _ in all_cases()
        if not same(flushed[name], results[kernel_set][name], problem)
    ]
    assert not different
    assert len(flushed) > 150


@pytest.mark.parametrize(
    "forced",
    ["nonsense", "AVX2", "avx512 ", *(name for name in KNOWN if name not in raw.kernel_sets())],
)
def test_a_set_that_this_cpu_lacks_is_an_error_that_lists_those_it_has(forced):
    script = (
        "import numpy as np\nfrom mindspore_addlora import raw\n"
        "one = np.ones((1, 16), np.float16)\n"
        "b, indices = np.ones((1, 1, 16, 16), np.float16), np.zeros(1, np.int32)\n"
        "two_phases = (one, one, b, indices, None, 0, 1.0, 0, -1, one.copy())\n"
        "for _ in range(2):\n"
        "    try: raw.add_lora(one, one, b, indices)\n"
        "    except ValueError as error: print(error)\n"
        "try: raw.add_lora_get_workspace_size(*two_phases)\n"
        "except ValueError as error: print(error)\n"
        "print(sorted(raw.backends()), raw.kernel_sets(), raw.last_kernel_set())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ADDLORA_ISA": forced},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *messages, backends = done.stdout.splitlines()
    assert len(messages) == 3
    assert len(set(messages)) == 1
    for word in ("ADDLORA_ISA", forced, *raw.kernel_sets()):
        assert word in messages[0]
    assert backends == f"{['aclnn', 'cpu']} {raw.kernel_sets()} None"


if __name__ == "__main__":
    main(sys.argv[1])
