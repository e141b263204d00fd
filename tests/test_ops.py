"""mal.add_lora in MindSpore on the CPU: both modes, ms.jit, static and dynamic shapes, refusals."""

from __future__ import annotations

import subprocess
import sys

import mindspore as ms
import mindspore_addlora as mal
import ml_dtypes
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mutable, nn
from mindspore_addlora import raw

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
MS_DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32}


@pytest.fixture(params=MODES)
def mode(request):
    ms.set_context(mode=MODES[request.param])
    return request.param


class Arrays:
    """A small problem: 7 rows, every kind of index."""

    def __init__(self, dtype=np.float32, w=4, layers=2, h1=24, h2=16, h3=20, r=6):
        rng = np.random.default_rng(7)
        draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        self.indices = np.array([2, -1, 0, 3, w, 2, 0], np.int32)
        self.y, self.x = draw(7, h3), draw(7, h1)
        self.a, self.b = draw(w, layers, r, h1), draw(w, layers, h2, r)

    def expected(self, **arguments):
        options = {"limits": "none", "scale": 0.5, "y_offset": 4, "layer_idx": 1} | arguments
        return raw.add_lora(self.y, self.x, self.b, self.indices, self.a, **options)

    def tensors(self):
        return Tensor(self.y), Tensor(self.x), Tensor(self.indices)


class Model(nn.Cell):
    def __init__(self, arrays: Arrays):
        super().__init__()
        self.a = Parameter(Tensor(arrays.a), name="a")
        self.b = Parameter(Tensor(arrays.b), name="b")

    def construct(self, y, x, indices, layer_idx=1, scale=0.5, y_offset=4, y_slice_size=-1):
        return mal.add_lora(y, x, self.b, indices, self.a, layer_idx, scale, y_offset, y_slice_size)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_raw_bit_for_bit(mode, dtype):
    arrays = Arrays(DTYPES[dtype])
    model = Model(arrays)
    y = Tensor(arrays.y, MS_DTYPES[dtype])
    out = model(y, Tensor(arrays.x, MS_DTYPES[dtype]), Tensor(arrays.indices))
    assert out.dtype == MS_DTYPES[dtype]
    assert bits(out.asnumpy()) == bits(arrays.expected())
    assert bits(y.asnumpy()) == bits(arrays.y), "y was changed"


def test_jit(mode):
    arrays = Arrays()

    @ms.jit
    def step(y, x, b, indices, a):
        return mal.add_lora(y, x, b, indices, a, layer_idx=1, scale=0.5, y_offset=4)

    y, x, indices = arrays.tensors()
    out = step(y, x, Tensor(arrays.b), indices, Tensor(arrays.a))
    assert bits(out.asnumpy()) == bits(arrays.expected())


def test_y_is_unchanged_for_its_other_readers(mode):
    arrays = Arrays()

    class TwoReaders(Model):
        def construct(self, y, x, indices):
            y = y + 0
            out = mal.add_lora(y, x, self.b, indices, self.a, 1, 0.5, 4)
            return out, y * 1, mal.add_lora(out, x, self.b, indices, self.a, 1, 0.5, 4)

    once, y, twice = TwoReaders(arrays)(*arrays.tensors())
    assert bits(y.asnumpy()) == bits(arrays.y)
    assert bits(once.asnumpy()) == bits(arrays.expected())
    arrays.y = once.asnumpy()
    assert bits(twice.asnumpy()) == bits(arrays.expected())


def test_without_weight_a(mode):
    arrays = Arrays()
    arrays.x = arrays.x[:, :6].copy()

    class Expand(Model):
        def construct(self, y, x, indices):
            return mal.add_lora(y, x, self.b, indices, None, 1, 0.5, 4)

    out = Expand(arrays)(*arrays.tensors())
    arrays.a = None
    assert bits(out.asnumpy()) == bits(arrays.expected())


def test_device_rounding(mode):
    arrays = Arrays(np.float16)

    class Device(Model):
        def construct(self, y, x, indices):
            return mal.add_lora(y, x, self.b, indices, self.a, 1, 0.5, 4, rounding="device")

    out = Device(arrays)(*arrays.tensors())
    assert bits(out.asnumpy()) == bits(arrays.expected(rounding="device"))
    assert bits(out.asnumpy()) != bits(arrays.expected())


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7)])
@pytest.mark.parametrize("per", ["token", "flat", "batch row"])
def test_leading_dimensions(mode, shape, per):
    arrays = Arrays()
    rng = np.random.default_rng(3)
    rows = int(np.prod(shape))
    y = rng.standard_normal((rows, 20), dtype=np.float32)
    x = rng.standard_normal((rows, 24), dtype=np.float32)
    if per == "batch row":
        indices = np.array([2, -1, 4, 0, 1, 3, 2], np.int32)[: shape[0]]
        arrays.indices = np.repeat(indices, rows // shape[0])
    else:
        arrays.indices = rng.integers(-1, 5, rows).astype(np.int32)
        indices = arrays.indices.reshape(shape) if per == "token" else arrays.indices
    arrays.y, arrays.x = y, x
    out = Model(arrays)(
        Tensor(y.reshape(*shape, 20)), Tensor(x.reshape(*shape, 24)), Tensor(indices)
    )
    assert out.shape == (*shape, 20)
    assert bits(out.asnumpy()) == bits(arrays.expected())


def test_int64_indices_are_judged_before_they_are_narrowed(mode):
    arrays = Arrays()
    wide = arrays.indices.astype(np.int64)
    wide[0] = 2**32 + 2  # would be adapter 2
    wide[2] = -(2**32)  # would be adapter 0
    wide[3] = 2**63 - 1
    arrays.indices[[0, 2, 3]] = -1
    y, x, _ = arrays.tensors()
    out = Model(arrays)(y, x, Tensor(wide))
    assert bits(out.asnumpy()) == bits(arrays.expected())


def test_an_index_above_w_is_no_adapter_and_the_cell_works_on(mode):
    arrays = Arrays()
    model = Model(arrays)
    y, x, good = arrays.tensors()
    bad = np.full(7, 5, np.int32)
    bad[3] = 2**31 - 1
    assert bits(model(y, x, Tensor(bad)).asnumpy()) == bits(arrays.y)
    assert bits(model(y, x, good).asnumpy()) == bits(arrays.expected())


def test_base_rows_keep_their_bits(mode):
    arrays = Arrays()
    arrays.y.view(np.uint32)[1, ::2] = 0x7FA00001  # a signalling NaN with a payload
    arrays.x[1] = np.nan
    out = Model(arrays)(*arrays.tensors()).asnumpy()
    assert bits(out[1]) == bits(arrays.y[1])


# Each breaks one rule: what is replaced, and what the message must say.
REFUSALS = {
    "y is not wide enough": (
        {"y": np.zeros((7, 12), np.float32)},
        561002,
        ["weight_b", "12", "16"],
    ),
    "x has other rows": ({"x": np.zeros((6, 24), np.float32)}, 561002, ["x", "[7, 20]", "[6, 24]"]),
    "x has another width": ({"x": np.zeros((7, 25), np.float32)}, 561002, ["weight_a", "25", "24"]),
    "x has another dtype": (
        {"x": np.zeros((7, 24), np.float16)},
        161002,
        ["x", "float32", "float16"],
    ),
    "an unsupported dtype": (
        {"y": np.zeros((7, 20), np.float64)},
        161002,
        ["y", "float32", "float64"],
    ),
    "too few indices": ({"indices": np.zeros(6, np.int32)}, 561002, ["indices", "[7, 20]", "[6]"]),
    "float indices": (
        {"indices": np.zeros(7, np.float32)},
        161002,
        ["indices", "int32", "float32"],
    ),
    "layer too high": ({"layer_idx": 2}, 561002, ["layer_idx", "L = 2", "got 2"]),
    "layer negative": ({"layer_idx": -1}, 561002, ["layer_idx", "got -1"]),
    "offset too high": ({"y_offset": 5}, 561002, ["y_offset", "20 - 16", "got 5"]),
    "offset negative": ({"y_offset": -1}, 561002, ["y_offset", "got -1"]),
    "slice not H2": ({"y_slice_size": 15}, 561002, ["y_slice_size", "H2 = 16", "got 15"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_why_and_the_cell_works_on(mode, name):
    replaced, code, words = REFUSALS[name]
    arrays = Arrays()
    model = Model(arrays)
    call = {"y": arrays.y, "x": arrays.x, "indices": arrays.indices}
    scalars = {"layer_idx": 1, "scale": 0.5, "y_offset": 4, "y_slice_size": -1}

    def run(arguments):
        tensors = [Tensor(arguments[key]) for key in call]
        return model(*tensors, *[arguments[key] for key in scalars])

    for _ in range(2):
        with pytest.raises(mal.raw.AddLoraError) as refused:
            run(call | scalars | replaced)
        assert refused.value.code == code
        for word in words:
            assert word in str(refused.value)
        out = run(call | scalars)
        assert bits(out.asnumpy()) == bits(arrays.expected())


def test_the_words_are_those_of_raw(mode):
    arrays = Arrays()
    with pytest.raises(raw.AddLoraError) as from_raw:
        arrays.expected(layer_idx=9)
    with pytest.raises(raw.AddLoraError) as from_mindspore:
        Model(arrays)(*arrays.tensors(), 9)
    assert str(from_raw.value) == str(from_mindspore.value)


@pytest.mark.parametrize("value", [1.0, True, "1"])
def test_a_scalar_of_the_wrong_type(mode, value):
    with pytest.raises(TypeError, match="layer_idx"):
        Model(Arrays())(*Arrays().tensors(), value)


def test_a_scale_that_is_no_number(mode):
    model = Model(Arrays())
    with pytest.raises(TypeError, match="scale: expected a real number, got str"):
        model(*Arrays().tensors(), 1, "0.5")
    assert bits(model(*Arrays().tensors()).asnumpy()) == bits(Arrays().expected())


@pytest.mark.parametrize("position", range(5))
def test_a_numpy_array_is_sent_to_raw(position):
    arrays = Arrays()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    values = [arrays.y, arrays.x, arrays.b, arrays.indices, arrays.a]
    name = ("y", "x", "weight_b", "indices", "weight_a")[position]
    given = [v if i == position else Tensor(v) for i, v in enumerate(values)]
    with pytest.raises(TypeError, match=f"{name}: expected a Tensor, got a numpy.ndarray"):
        mal.add_lora(*given)


def test_a_mutable_layer_with_static_shapes_is_refused_at_compile_time():
    ms.set_context(mode=ms.GRAPH_MODE)
    model = Model(Arrays())
    with pytest.raises(TypeError, match="layer_idx: expected a constant"):
        model(*Arrays().tensors(), mutable(7))
    assert bits(model(*Arrays().tensors(), 1).asnumpy()) == bits(Arrays().expected())


class TestDynamicShapes:
    def model(self, arrays, *scalars):
        model = Model(arrays)
        model.set_inputs(
            Tensor(shape=[None, 20], dtype=ms.float32),
            Tensor(shape=[None, 24], dtype=ms.float32),
            Tensor(shape=[None], dtype=ms.int32),
            *scalars,
        )
        return model

    @pytest.mark.parametrize("rows", [[7, 3, 1, 0, 5]])
    def test_any_number_of_rows(self, mode, rows):
        arrays = Arrays()
        model = self.model(arrays)
        expected = arrays.expected()
        for n in rows:
            y, x, indices = arrays.y[:n], arrays.x[:n], arrays.indices[:n]
            out = model(Tensor(y), Tensor(x), Tensor(indices))
            assert out.shape == (n, 20)
            assert bits(out.asnumpy()) == bits(expected[:n])

    def test_dynamic_leading_dimensions(self, mode):
        arrays = Arrays()
        model = Model(arrays)
        model.set_inputs(
            Tensor(shape=[None, None, 20], dtype=ms.float32),
            Tensor(shape=[None, None, 24], dtype=ms.float32),
            Tensor(shape=[None], dtype=ms.int32),
        )
        for batch, tokens in ((2, 3), (1, 5), (3, 2)):
            rng = np.random.default_rng(batch)
            arrays.y = rng.standard_normal((batch * tokens, 20), dtype=np.float32)
            arrays.x = rng.standard_normal((batch * tokens, 24), dtype=np.float32)
            indices = rng.integers(-1, 5, batch).astype(np.int32)
            arrays.indices = np.repeat(indices, tokens)
            out = model(
                Tensor(arrays.y.reshape(batch, tokens, 20)),
                Tensor(arrays.x.reshape(batch, tokens, 24)),
                Tensor(indices),
            )
            assert bits(out.asnumpy()) == bits(arrays.expected())

    def test_a_mutable_layer(self, mode):
        arrays = Arrays()
        model = self.model(arrays, mutable(1))
        for layer in (0, 1, 0):
            out = model(*arrays.tensors(), mutable(layer))
            assert bits(out.asnumpy()) == bits(arrays.expected(layer_idx=layer))

    def test_what_is_static_is_checked_before_anything_runs(self, mode):
        arrays = Arrays()
        with pytest.raises(raw.AddLoraError, match="layer_idx.*got 7"):
            self.model(arrays, 7)(*arrays.tensors(), 7)

    def test_what_only_the_data_shows_reaches_python_with_its_reason(self, mode):
        arrays = Arrays()
        model = self.model(arrays)
        y, x, indices = arrays.tensors()
        with pytest.raises((RuntimeError, ValueError), match=r"x: expected.*\[7, 20\].*\[6, 24\]"):
            model(y, x[:6], indices).asnumpy()


def test_checking_indices_can_be_asked_for(tmp_path):
    program = """
import numpy as np, mindspore as ms, mindspore_addlora as mal
from mindspore import Tensor
ms.set_context(mode=ms.PYNATIVE_MODE)
y, b = Tensor(np.zeros((2, 4), np.float32)), Tensor(np.ones((3, 1, 4, 2), np.float32))
z = Tensor(np.ones((2, 2), np.float32))
try:
    mal.add_lora(y, z, b, Tensor(np.array([0, 4], np.int32))).asnumpy()
except RuntimeError as error:
    print("refused:", error)
print(mal.add_lora(y, z, b, Tensor(np.array([0, 3], np.int32))).asnumpy()[:, 0])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**__import__("os").environ, "ADDLORA_CHECK_INDICES": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "indices: expected each at most W = 3" in done.stdout
    assert "got 4 in row 1" in done.stdout
    assert "[2. 0.]" in done.stdout
