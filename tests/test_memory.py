"""Memory: no growth over many calls, scratch within its bound, and MemoryError where there is no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore_addlora import raw
from reference import make_problem

FACTOR = int(os.environ.get("ADDLORA_TEST_FACTOR", "1"))
ORDER = ("y", "x", "weight_b", "indices", "weight_a", "layer_idx", "scale", "y_offset")

# What docs/guarantees.md says of scratch: fixed, for each row, and for each thread.
FIXED_BYTES = 8 << 20
ROW_BYTES = 128
THREAD_BYTES = 1 << 19
RANK_BYTES = 2048  # a rank, for each thread


def run(script: str) -> str:
    """What a script prints; it is run from a file, since MindSpore reads the sources of cells."""
    Path("script.py").write_text(PROLOGUE + script)  # in a directory of the test's own
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        timeout=300 * FACTOR,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "ADDLORA_TEST_FACTOR": str(FACTOR)},
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


PROLOGUE = """
import os, resource, sys, threading
import numpy as np
from mindspore_addlora import raw

FACTOR = int(os.environ["ADDLORA_TEST_FACTOR"])
rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(np.float16)
y, x = draw(5, 64), draw(5, 48)
a, b = draw(4, 2, 16, 48), draw(4, 2, 32, 16)
indices = np.array([0, -1, 3, 4, 0], np.int32)
out = np.empty_like(y)

def resident():
    # The pages of this process, in KiB.
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024

def growth(call, calls=100_000, warm_up=3_000):
    for _ in range(warm_up): call()
    before = resident()
    for _ in range(calls * FACTOR): call()
    return resident() - before

def limit(megabytes):
    # Address space above what there is now.
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20),) * 2)
"""

CALLS = {
    "raw.add_lora with out": "def call(): raw.add_lora(y, x, b, indices, a, out=out)",
    "raw.add_lora without out": "def call(): raw.add_lora(y, x, b, indices, a)",
    "refusals": """
def call():
    try: raw.add_lora(y, x, b, indices, a, layer_idx=2)
    except raw.AddLoraError: pass
""",
    "an index above W": """
bad = np.array([0, 5, 0, 0, 0], np.int32)
def call():
    try: raw.add_lora(y, x, b, bad, a)
    except raw.AddLoraError: pass
""",
    "wrong types": """
def call():
    try: raw.add_lora(y, x, b, indices.tolist(), a)
    except TypeError: pass
""",
    "two phases": """
def call():
    size, executor = raw.add_lora_get_workspace_size(y, x, b, indices, a, 1, 1.0, 0, -1, out)
    raw.add_lora_execute(bytearray(size), executor)
""",
    "executors that never run": """
def call(): raw.add_lora_get_workspace_size(y, x, b, indices, a, 1, 1.0, 0, -1, out)
""",
    "a repeatable executor": """
size, executor = raw.add_lora_get_workspace_size(y, x, b, indices, a, 1, 1.0, 0, -1, out)
executor.set_repeatable()
workspace = bytearray(size)
def call(): raw.add_lora_execute(workspace, executor)
""",
}
# A leak of 16 bytes a call would be 1.6 MB.
ALLOWED_KIB = 1024


@pytest.mark.parametrize("name", CALLS)
def test_no_growth_over_100_000_calls(name):
    grown = int(run(CALLS[name] + "\nprint(growth(call))"))
    assert grown < ALLOWED_KIB, f"{grown} KiB"


def test_the_growth_would_be_seen():
    kept = "kept = []\ndef call(): kept.append(bytearray(16))\nprint(growth(call))"
    assert int(run(kept)) > 2 * ALLOWED_KIB


def test_no_growth_over_threads_that_come_and_go():
    """Each thread has scratch of its own while it lives."""
    script = """
raw.set_num_threads(2)
big = draw(300, 1024), draw(300, 1024), draw(2, 1, 512, 16), np.zeros(300, np.int32), draw(2, 1, 16, 1024)
def call():
    thread = threading.Thread(target=lambda: raw.add_lora(*big))
    thread.start()
    thread.join()
print(growth(call, calls=300, warm_up=50))
"""
    assert int(run(script)) < 4 * ALLOWED_KIB


MINDSPORE = """
import mindspore as ms, mindspore_addlora as mal
from mindspore import Tensor, nn
ms.set_context(mode=ms.MODE)
tensors = [Tensor(array) for array in (y, x, b, indices, a)]
class Model(nn.Cell):
    def construct(self, y, x, b, indices, a): return mal.add_lora(y, x, b, indices, a)
model = Model()
def call(): model(*tensors).asnumpy()
print(growth(call, calls=5_000, warm_up=12_000))
"""


@pytest.mark.parametrize("mode", ["GRAPH_MODE", "PYNATIVE_MODE"])
def test_no_growth_through_mindspore(mode):
    """PyNative fills a cache of its own in the first 10,000 steps of any custom operator (5 MB)."""
    assert int(run(MINDSPORE.replace("MODE", mode)).split()[-1]) < ALLOWED_KIB


# ---- scratch ---------------------------------------------------------------------------------


def workspace_size(threads: int, **sizes: int) -> int:
    before = raw.get_num_threads()
    raw.set_num_threads(threads)
    try:
        problem = make_problem(np.random.default_rng(0), layer_idx=0, y_offset=0, **sizes)
        arguments = [problem[name] for name in ORDER]
        out = np.empty_like(problem["y"])
        return raw.add_lora_get_workspace_size(*arguments, -1, out, limits="none")[0]
    finally:
        raw.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("b", [1, 33, 5000])
@pytest.mark.parametrize("r", [1, 16, 128, 600])
def test_scratch_is_bounded(threads, b, r):
    size = workspace_size(threads, b=b, h1=16, h2=16, h3=16, r=r, w=3, l=1)
    bound = FIXED_BYTES + ROW_BYTES * b + threads * (THREAD_BYTES + RANK_BYTES * r)
    assert 0 < size <= bound


@pytest.mark.parametrize(
    "larger",
    [{"h1": 4096}, {"h2": 4096, "h3": 4096}, {"h3": 4096}, {"w": 4000}, {"l": 300}],
    ids=str,
)
def test_scratch_does_not_grow_with_widths_adapters_or_layers(larger):
    sizes = {"b": 8, "h1": 16, "h2": 16, "h3": 16, "r": 4, "w": 100, "l": 1}
    assert workspace_size(2, **sizes | larger) <= workspace_size(2, **sizes)


# ---- no memory -------------------------------------------------------------------------------

# 2^20 ranks that are one number in memory: the scratch of a call is gigabytes.
LARGE_SCRATCH = """
ranks = 1 << 20
large = dict(
    y=np.zeros((1, 16), np.float16),
    x=np.broadcast_to(np.float16(1), (1, ranks)),
    weight_b=np.broadcast_to(np.float16(1), (1, 1, 16, ranks)),
    indices=np.zeros(1, np.int32),
    limits="none",
)
expected = raw.add_lora(y, x, b, indices, a).tobytes()
def still_right(): return raw.add_lora(y, x, b, indices, a).tobytes() == expected
"""


@pytest.mark.parametrize("phases", [1, 2])
def test_no_memory_for_scratch(phases):
    script = (
        LARGE_SCRATCH
        + """
limit(200)
into = np.zeros((1, 16), np.float16)
try:
    if PHASES == 1:
        raw.add_lora(**large, out=into)
    else:
        size, executor = raw.add_lora_get_workspace_size(
            large["y"], large["x"], large["weight_b"], large["indices"], None, 0, 1.0, 0, -1, into,
            limits="none")
        bytearray(size)
except MemoryError as error:
    print("MemoryError", not into.any(), still_right())
"""
    )
    assert run(script.replace("PHASES", str(phases))).split() == ["MemoryError", "True", "True"]


def test_no_memory_for_the_result():
    script = (
        LARGE_SCRATCH
        + """
limit(100)
rows = 1 << 22
try:
    raw.add_lora(np.broadcast_to(np.float16(1), (rows, 64)), np.broadcast_to(np.float16(1), (rows, 48)), b,
                 np.broadcast_to(np.int32(0), rows), a)
except MemoryError as error:
    print("MemoryError", still_right())
"""
    )
    assert run(script).split() == ["MemoryError", "True"]


def test_no_memory_for_threads():
    """Threads that cannot be started are done without."""
    script = """
big = draw(300, 1024), draw(300, 1024), draw(2, 1, 512, 16), np.zeros(300, np.int32), draw(2, 1, 16, 1024)
raw.set_num_threads(1)
expected = raw.add_lora(*big)
into = np.empty_like(expected)
raw.set_num_threads(64)
raw.add_lora_get_workspace_size(*big, 0, 1.0, 0, -1, into)
limit(60)
raw.add_lora(*big, out=into)
started = len(os.listdir("/proc/self/task"))
print(into.tobytes() == expected.tobytes(), started < 20)
"""
    assert run(script).split() == ["True", "True"]


def test_no_memory_at_any_moment():
    """Under limits from nothing to plenty: MemoryError or the right result, and never another end."""
    script = (
        LARGE_SCRATCH
        + """
small = dict(large, x=large["x"][:, :50_000], weight_b=large["weight_b"][..., :50_000])
right = raw.add_lora(**small)
seen = set()
def attempt():
    try: seen.add("right" if (raw.add_lora(**small) == right).all() else "wrong")
    except MemoryError: seen.add("MemoryError")
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
for megabytes in range(0, 300, 5):
    resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20), hard))
    # A thread of its own has no scratch yet.
    try: thread = threading.Thread(target=attempt); thread.start(); thread.join()
    except (RuntimeError, MemoryError): continue
print(*sorted(seen))
"""
    )
    assert run(script).split() == ["MemoryError", "right"]
