"""Several threads and processes at once, MindSpore among them. (raw alone: test_raw_threads.py; under the
thread sanitizer: tests/cpp/check_threads.cpp.)"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore_addlora import raw
from mindspore_calls import Model
from reference import DTYPES, Array, Problem, assert_same_bits, make_problem

FACTOR = int(os.environ.get("ADDLORA_TEST_FACTOR", "1"))


@pytest.fixture(autouse=True)
def the_number_of_threads_is_restored() -> Iterator[None]:
    before = raw.get_num_threads()
    yield
    raw.set_num_threads(before)


def problems() -> list[Problem]:
    rng = np.random.default_rng(5)
    sizes = {"b": 60, "h1": 512, "h2": 480, "h3": 500}
    return [make_problem(rng, **sizes, r=32, dtype=dtype) for dtype in DTYPES.values()]


class Others:
    """Threads that do their work until the block ends; what one raises is raised there."""

    def __init__(self, *works) -> None:
        self.stop = threading.Event()
        self.errors: list[Exception] = []
        self.rounds = [0] * len(works)
        self.threads = [
            threading.Thread(target=self.loop, args=(number, work))
            for number, work in enumerate(works)
        ]

    def loop(self, number, work) -> None:
        try:
            while not self.stop.is_set():
                work()
                self.rounds[number] += 1
        except Exception as error:
            self.errors.append(error)

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        assert all(self.rounds), "each of them worked"


def caller(problem: Problem, expected: Array):
    return lambda: assert_same_bits(raw.add_lora(**problem, limits="none"), expected)


def setter(first: int):
    numbers = [(first + i) % 16 + 1 for i in range(16)]
    return lambda: [raw.set_num_threads(n) for n in numbers]


def test_set_num_threads_from_several_threads_during_calls():
    work = problems()
    raw.set_num_threads(1)
    expected = [raw.add_lora(**problem, limits="none") for problem in work]
    callers = [caller(*both) for both in zip(work, expected, strict=True)]
    with Others(setter(0), setter(5), setter(11), *callers[:2]):
        for _ in range(100 * FACTOR):
            callers[2]()
    assert 1 <= raw.get_num_threads() <= 16


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def test_a_model_runs_while_other_threads_call_raw(mode):
    ms.set_context(mode=mode)
    work = problems()
    raw.set_num_threads(1)
    expected = [raw.add_lora(**problem, limits="none") for problem in work]
    raw.set_num_threads(3)
    names = ("y", "x", "weight_b", "indices", "weight_a")
    model = Model(work[0], "float32")
    tensors = [Tensor(work[0][name]) for name in names]
    callers = [caller(*both) for both in zip(work, expected, strict=True)]
    with Others(*callers, setter(2)):
        for _ in range(50 * FACTOR):
            assert_same_bits(model(*tensors).asnumpy(), expected[0])


FORK = """
import multiprocessing, signal, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork where there are threads
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn
sys.path.insert(0, TESTS)
from mindspore_calls import Model
from mindspore_addlora import raw
from reference import make_problem

problem = make_problem(np.random.default_rng(5), b=60, h1=512, h2=480, h3=500, r=32)
expected = raw.add_lora(**problem, limits="none").tobytes()
ms.set_context(mode=ms.GRAPH_MODE)
model = Model(problem, "float32")
tensors = [Tensor(problem[name]) for name in ("y", "x", "weight_b", "indices", "weight_a")]
step = lambda: model(*tensors).asnumpy().tobytes() == expected

def loader(queue):
    signal.alarm(60)
    for _ in range(20):
        queue.put(raw.add_lora(**problem, limits="none").tobytes() == expected)

raw.set_num_threads(3)
right = [step()]
context = multiprocessing.get_context("fork")
queue = context.Queue()
loaders = [context.Process(target=loader, args=(queue,)) for _ in range(3)]
for process in loaders: process.start()
loaded = 0
while loaded < 60:
    right.append(queue.get(timeout=60))
    right.append(step())
    loaded += 1
for process in loaders: process.join()
print(all(right), len(right), [process.exitcode for process in loaders])
"""


def test_data_loaders_that_fork_after_the_model_ran():
    """Each calls raw in a child of the process that runs the model, which goes on meanwhile."""
    script = Path("fork.py")
    script.write_text(FORK.replace("TESTS", repr(str(Path(__file__).parent))))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True 121 [0, 0, 0]"


class Dense(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Dense(256, 256)

    def construct(self, x):
        return self.q_proj(x)


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def test_a_step_sees_the_old_adapter_or_the_new_one_and_no_mixture(mode, tmp_path):
    """One name is deleted and loaded anew, by turns with two sets of weights, while another thread steps."""
    ms.set_context(mode=mode)
    rng = np.random.default_rng(3)
    model = Dense()
    lora = mal.MultiLora(model, ["q_proj"], max_rank=16, num_adapters=2)
    x = Tensor(rng.standard_normal((4, 256), np.float32))
    versions = ("old", "new")
    expected = {}
    for version in versions:
        a, b = (
            rng.standard_normal((16, 256), np.float32),
            rng.standard_normal((256, 16), np.float32),
        )
        weights = mal.peft.LoraWeights(a, b, 1.0, 16)
        mal.peft.write_adapter(tmp_path / version, {"q_proj": weights})
        lora.load_adapter(tmp_path / version, version)
        lora.route([version, None, version, None])
        expected[model(x).asnumpy().tobytes()] = version
        lora.route([])
        lora.delete_adapter(version)
    assert sorted(expected.values()) == ["new", "old"]
    lora.load_adapter(tmp_path / "old", "adapter")
    loads = 0

    def swap() -> None:
        nonlocal loads
        try:
            lora.route([])
            lora.delete_adapter("adapter")
        except ValueError:  # a step has routed it again
            return
        loads += 1
        lora.load_adapter(tmp_path / versions[loads % 2], "adapter")

    seen = []
    with Others(swap):
        while len(seen) < 200 * FACTOR or loads < 10:
            try:
                with lora.step(["adapter", None, "adapter", None]):
                    out = model(x).asnumpy().tobytes()
            except ValueError as error:
                assert "expected the name of a loaded adapter" in str(error)
            else:
                seen.append(expected[out])
    assert set(seen) == set(versions)


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def test_loads_and_deletions_of_others_change_no_running_step(mode, tmp_path):
    """Without a step around it: the model's own adapter stays where it is and as it is."""
    ms.set_context(mode=mode)
    rng = np.random.default_rng(4)
    model = Dense()
    lora = mal.MultiLora(model, ["q_proj"], max_rank=16, num_adapters=3)
    for name in ("mine", "other"):
        a, b = (
            rng.standard_normal((16, 256), np.float32),
            rng.standard_normal((256, 16), np.float32),
        )
        weights = mal.peft.LoraWeights(a, b, 1.0, 16)
        mal.peft.write_adapter(tmp_path / name, {"q_proj": weights})
    lora.load_adapter(tmp_path / "mine", "mine")
    lora.route(["mine", None])
    x = Tensor(rng.standard_normal((3, 256), np.float32))
    expected = model(x).asnumpy()

    def churn() -> None:
        lora.load_adapter(tmp_path / "other", "other")
        lora.delete_adapter("other")

    with Others(churn):
        for _ in range(200 * FACTOR):
            assert_same_bits(model(x).asnumpy(), expected)
