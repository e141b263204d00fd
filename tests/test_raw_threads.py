"""Threads: how many, the same bits from any number, the GIL, callers at once, and fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from mindspore_addlora import raw
from reference import DTYPES, Array, Problem, assert_right, assert_same_bits, bits, make_problem


@pytest.fixture(autouse=True)
def the_number_of_threads_is_restored() -> Iterator[None]:
    before = raw.get_num_threads()
    yield
    raw.set_num_threads(before)


# ---- how many ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, np.int32(5)])
def test_set_and_get(n):
    raw.set_num_threads(n)
    assert raw.get_num_threads() == n
    assert type(raw.get_num_threads()) is int


@pytest.mark.parametrize("n", [0, -1, -(2**63)])
def test_fewer_than_one_is_a_value_error(n):
    raw.set_num_threads(3)
    with pytest.raises(ValueError, match=str(n)):
        raw.set_num_threads(n)
    assert raw.get_num_threads() == 3


@pytest.mark.parametrize("n", [1.0, "2", None, True, [1]], ids=repr)
def test_what_is_no_integer_is_a_type_error(n):
    raw.set_num_threads(3)
    with pytest.raises(TypeError):
        raw.set_num_threads(n)
    assert raw.get_num_threads() == 3


def test_a_number_beyond_64_bits_is_an_overflow_error():
    with pytest.raises(OverflowError):
        raw.set_num_threads(2**64)


def test_the_setting_holds_for_all_python_threads():
    seen = []
    raw.set_num_threads(5)
    thread = threading.Thread(target=lambda: seen.append(raw.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [5]


@pytest.mark.parametrize(
    "environment,expected",
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"ADDLORA_NUM_THREADS": "5"}, 5),
        ({"ADDLORA_NUM_THREADS": "5", "OMP_NUM_THREADS": "3"}, 5),
        ({"ADDLORA_NUM_THREADS": "1", "OMP_NUM_THREADS": "3"}, 1),
        ({"ADDLORA_NUM_THREADS": "", "OMP_NUM_THREADS": "3"}, 3),
    ],
    ids=str,
)
def test_the_environment_is_respected(environment, expected):
    names = ("ADDLORA_NUM_THREADS", "OMP_NUM_THREADS")
    rest = {k: v for k, v in os.environ.items() if k not in names}
    done = run("print(raw.get_num_threads(), threads_of_a_call())", rest | environment)
    setting, used = map(int, done.stdout.split())
    assert setting == expected
    assert 1 <= used <= expected


@pytest.mark.parametrize("value", ["0", "-2", "many", "2.5", "999999999999999999999"])
def test_a_setting_that_makes_no_sense_does_not_stop_a_call(value):
    for name in ("ADDLORA_NUM_THREADS", "OMP_NUM_THREADS"):
        done = run("print(raw.get_num_threads(), threads_of_a_call())", os.environ | {name: value})
        assert int(done.stdout.split()[0]) >= 1


# What a script begins with: a call that is large enough for several threads, and its right result.
PROLOGUE = """
import os, signal, sys, threading
import numpy as np
from mindspore_addlora import raw

rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(np.float16)
y, x = draw(64, 1024), draw(64, 1024)
a, b = draw(4, 1, 64, 1024), draw(4, 1, 1024, 64)
indices = rng.integers(-1, 5, 64).astype(np.int32)

def call():
    return raw.add_lora(y, x, b, indices, a, scale=0.01).tobytes()

def threads_of_a_call():
    call()
    return len(os.listdir("/proc/self/task"))
"""


def run(script: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    # numpy's own threads would be counted with ours.
    environment = dict(os.environ if environment is None else environment)
    environment["OPENBLAS_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_one_thread_is_the_callers_own():
    done = run("raw.set_num_threads(1); print(threads_of_a_call())")
    assert int(done.stdout) == 1


# ---- the same bits -----------------------------------------------------------------------------


def problems(dtype: str) -> list[Problem]:
    """Large enough to be shared out: many rows, few rows with much to read, one row, a slice."""
    rng = np.random.default_rng(1)
    kind = DTYPES[dtype]
    return [
        make_problem(rng, b=300, h1=256, h2=240, h3=300, r=16, w=7, dtype=kind),
        make_problem(rng, b=10, h1=1040, h2=1000, h3=1030, r=128, w=5, dtype=kind),
        make_problem(rng, b=1, h1=4096, h2=4096, h3=4112, r=64, indices="one", dtype=kind),
        make_problem(rng, b=33, h2=2048, h3=2100, r=130, with_a=False, dtype=kind),
        make_problem(rng, b=500, h3=4096, indices="none", dtype=kind),
    ]


def run_all(problem: Problem) -> list[Array]:
    roundings = ["float32", "device"] if problem["y"].dtype == np.float16 else ["float32"]
    return [raw.add_lora(**problem, limits="none", rounding=rounding) for rounding in roundings]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    for problem in problems(dtype):
        raw.set_num_threads(1)
        expected = run_all(problem)
        assert_right(expected[0], problem)
        for threads in (2, 3, 8, 16):
            raw.set_num_threads(threads)
            for got, wanted in zip(run_all(problem), expected, strict=True):
                assert_same_bits(got, wanted, f"{threads} threads")


def rows_of(problem: Problem, rows: Array) -> Problem:
    return problem | {name: problem[name][rows] for name in ("y", "x", "indices")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_any_order_and_any_neighbours_give_the_same_bits(threads, dtype):
    rng = np.random.default_rng(2)
    raw.set_num_threads(threads)
    for problem in problems(dtype)[:4]:
        b = len(problem["indices"])
        expected = run_all(problem)
        selections = [rng.permutation(b), np.arange(b)[::-1], np.array([b // 2])]
        selections += [rng.integers(0, b, size) for size in (1, 2, 5, 17, 64, 2 * b)]
        selections.append(np.full(40, int(rng.integers(0, b))))
        for rows in selections:
            for got, wanted in zip(run_all(rows_of(problem, rows)), expected, strict=True):
                assert_same_bits(got, wanted[rows], f"{len(rows)} rows")


def test_in_place_and_two_phases_with_many_threads():
    for problem in problems("float16")[:4]:
        raw.set_num_threads(1)
        expected = raw.add_lora(**problem, limits="none")
        raw.set_num_threads(8)
        y = problem["y"].copy()
        raw.add_lora(**problem | {"y": y}, out=y, limits="none")
        assert_same_bits(y, expected)
        out = np.empty_like(y)
        order = ("y", "x", "weight_b", "indices", "weight_a", "layer_idx", "scale", "y_offset")
        size, executor = raw.add_lora_get_workspace_size(
            *(problem[name] for name in order), -1, out, limits="none"
        )
        # The workspace was sized for 8 threads: it suffices whatever is set when it runs.
        for threads in (8, 1, 64):
            raw.set_num_threads(threads)
            if threads == 8:
                executor.set_repeatable()
            raw.add_lora_execute(bytearray(size), executor)
            assert_same_bits(out, expected, f"{threads} threads")


# ---- Python's threads --------------------------------------------------------------------------


@pytest.mark.parametrize("phases", [1, 2])
def test_the_gil_is_released(phases):
    """With a switch interval without end, a thread runs during a call only if the call lets it."""
    raw.set_num_threads(1)
    problem = make_problem(
        np.random.default_rng(3), b=2000, h1=1024, h2=1024, h3=1024, r=64, y_offset=0
    )
    out = np.empty_like(problem["y"])
    order = ("y", "x", "weight_b", "indices", "weight_a", "layer_idx", "scale", "y_offset")
    size, executor = raw.add_lora_get_workspace_size(*(problem[name] for name in order), -1, out)
    executor.set_repeatable()
    workspace = bytearray(size)
    progress = 0
    started, stop = threading.Event(), threading.Event()

    def count() -> None:
        nonlocal progress
        started.set()
        while not stop.wait(0.0001):
            progress += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        started.wait()
        sys.setswitchinterval(1000)
        moved = False
        for _ in range(50):
            before = progress
            if phases == 1:
                raw.add_lora(**problem, out=out)
            else:
                raw.add_lora_execute(workspace, executor)
            moved = progress > before
            if moved:
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert moved


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_many_python_threads_at_once(threads):
    raw.set_num_threads(threads)
    work = [problem for dtype in DTYPES for problem in problems(dtype)]
    expected = [run_all(problem) for problem in work]
    start = threading.Barrier(8)
    wrong: list[object] = []
    finished: list[int] = []

    def caller(number: int) -> None:
        try:
            start.wait()
            for i in range(len(work)):
                at = (i + number) % len(work)
                for got, wanted in zip(run_all(work[at]), expected[at], strict=True):
                    if not np.array_equal(bits(got), bits(wanted)):
                        wrong.append((number, at))
            finished.append(number)
        except Exception as error:
            wrong.append(error)

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong
    assert sorted(finished) == list(range(8))


def test_refusals_in_one_thread_do_not_disturb_another():
    problem = problems("float32")[0]
    expected = raw.add_lora(**problem, limits="none")
    bad = problem | {"indices": np.full(300, 8, np.int32)}
    refusals: list[int] = []

    def refused() -> None:
        for _ in range(50):
            try:
                raw.add_lora(**bad, limits="none")
            except raw.AddLoraError as error:
                refusals.append(error.code)

    thread = threading.Thread(target=refused)
    thread.start()
    for _ in range(20):
        assert_same_bits(raw.add_lora(**problem, limits="none"), expected)
    thread.join()
    assert refusals == [561002] * 50


def test_the_number_of_threads_may_change_during_calls():
    problem = problems("float16")[1]
    expected = raw.add_lora(**problem, limits="none")
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for n in (1, 4, 2, 9, 3):
                raw.set_num_threads(n)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(50):
            assert_same_bits(raw.add_lora(**problem, limits="none"), expected)
    finally:
        stop.set()
        thread.join()


# ---- fork --------------------------------------------------------------------------------------

# An alarm ends a child that hangs, and its status shows it.
FORK = """
import warnings
# Python 3.12 warns of fork where there are threads.
warnings.simplefilter("ignore", DeprecationWarning)
raw.set_num_threads(4)
expected = call()

def child_is_right(fork=os.fork):
    pid = fork()
    if pid == 0:
        signal.alarm(30)
        os._exit(0 if all(call() == expected for _ in range(3)) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_a_child_computes_after_its_parent_did():
    done = run(
        FORK + "print([child_is_right() for _ in range(3)], call() == expected, child_is_right())"
    )
    assert done.stdout.strip() == "[0, 0, 0] True 0"


def test_a_grandchild_computes():
    script = """
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    os._exit(0 if call() == expected and child_is_right() == 0 and call() == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), call() == expected)
"""
    assert run(FORK + script).stdout.strip() == "0 True"


def test_a_child_of_a_parent_that_is_computing():
    """The parent's other threads hold whatever they hold at the moment of the fork."""
    script = """
stop = threading.Event()
def loop():
    while not stop.is_set():
        assert call() == expected
threads = [threading.Thread(target=loop) for _ in range(2)]
for thread in threads: thread.start()
results = [child_is_right() for _ in range(10)]
stop.set()
for thread in threads: thread.join()
print(results)
"""
    assert run(FORK + script).stdout.strip() == str([0] * 10)


def test_processes_of_multiprocessing():
    script = """
import multiprocessing
def worker(queue):
    signal.alarm(60)
    queue.put(call() == expected)
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
workers = [context.Process(target=worker, args=(queue,)) for _ in range(3)]
for worker in workers: worker.start()
for worker in workers: worker.join()
print([worker.exitcode for worker in workers])
print([queue.get() for worker in workers if worker.exitcode == 0])
"""
    assert run(FORK + script).stdout.splitlines() == ["[0, 0, 0]", "[True, True, True]"]


def test_a_child_may_set_its_own_number_of_threads():
    script = """
def fork_and_set():
    pid = os.fork()
    if pid == 0: raw.set_num_threads(2)
    return pid
print(child_is_right(fork_and_set), raw.get_num_threads())
"""
    assert run(FORK + script).stdout.strip() == "0 4"


def test_the_process_ends_while_workers_wait():
    assert run("raw.set_num_threads(4); call(); print('done')").stdout.strip() == "done"


def test_the_process_ends_while_a_daemon_thread_computes():
    """Its call returns to an interpreter that is gone: a normal exit all the same."""
    script = """
def forever():
    while True: call()
threading.Thread(target=forever, daemon=True).start()
call()
print('done')
"""
    for _ in range(5):
        assert run(script).stdout.strip() == "done"
