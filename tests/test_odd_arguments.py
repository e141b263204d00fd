"""Arguments that nobody should pass to MindSpore's side of the operator: refused by name, or taken."""

from __future__ import annotations

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
import pytest
from mindspore import Tensor, nn

INTEGERS = ("layer_idx", "y_offset", "y_slice_size")


@pytest.fixture(params=[ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
def mode(request):
    ms.set_context(mode=request.param)
    return request.param


def call() -> dict[str, object]:
    ones = lambda *shape: Tensor(np.ones(shape, np.float32))
    return {
        "y": ones(3, 16),
        "x": ones(3, 4),
        "weight_b": ones(2, 2, 8, 2),
        "indices": Tensor(np.array([0, 1, -1], np.int32)),
        "weight_a": ones(2, 2, 2, 4),
        "layer_idx": 0,
        "scale": 1.0,
        "y_offset": 0,
        "y_slice_size": -1,
    }


class Model(nn.Cell):
    def construct(
        self, y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size
    ):
        return mal.add_lora(
            y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size
        )


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**200])
def test_an_integer_beyond_64_bits_is_an_overflow_error_that_names_it(mode, name, value):
    with pytest.raises(OverflowError, match=f"{name}: expected a 64-bit integer, got {value}"):
        mal.add_lora(**call() | {name: value})


def test_a_scale_beyond_64_bits(mode):
    with pytest.raises(OverflowError, match="scale: expected a float or a 64-bit integer"):
        mal.add_lora(**call() | {"scale": 2**63})


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_taken_as_raw_takes_them(mode, integer):
    given = call() | {"layer_idx": integer(1), "y_offset": integer(8), "y_slice_size": integer(8)}
    expected = mal.add_lora(**call() | {"layer_idx": 1, "y_offset": 8}).asnumpy()
    assert expected[0, 8] == 9.0
    assert mal.add_lora(**given).asnumpy().tobytes() == expected.tobytes()
    assert Model()(*given.values()).asnumpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["y", "x", "weight_b", "indices"])
@pytest.mark.parametrize("through", ["function", "cell"])
def test_a_tensor_that_is_not_given_is_161001(mode, name, through):
    given = call() | {name: None}
    with pytest.raises(mal.raw.AddLoraError, match=f"{name}: expected a tensor, got None") as no:
        mal.add_lora(**given) if through == "function" else Model()(*given.values())
    assert no.value.code == 161001


@pytest.mark.parametrize("name", ["y", "x", "weight_b", "indices", "weight_a"])
@pytest.mark.parametrize("value", ["text", 1.0, [1.0]], ids=["str", "float", "list"])
def test_what_is_no_tensor_is_a_type_error_that_names_it(mode, name, value):
    with pytest.raises(TypeError, match=f"{name}: expected a Tensor"):
        Model()(*(call() | {name: value}).values())


UNKNOWN = {"y": ms.float32, "x": ms.float32, "weight_b": ms.float32, "weight_a": ms.float32}


def of_unknown_rank(indices_dtype):
    model = Model()
    tensors = [Tensor(shape=None, dtype=dtype) for dtype in UNKNOWN.values()]
    tensors.insert(3, Tensor(shape=None, dtype=indices_dtype))
    model.set_inputs(*tensors, 0, 1.0, 0, -1)
    return model


def test_shapes_of_unknown_rank():
    ms.set_context(mode=ms.GRAPH_MODE)
    model = of_unknown_rank(ms.int32)
    out = model(*call().values()).asnumpy()
    assert out[:, 0].tolist() == [9.0, 9.0, 1.0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.float32])
def test_indices_of_unknown_rank_and_another_dtype_are_refused_before_they_are_read(dtype):
    ms.set_context(mode=ms.GRAPH_MODE)
    indices = Tensor(np.zeros(3, dtype))
    given = call() | {"indices": indices}
    with pytest.raises(
        (RuntimeError, ValueError, TypeError), match="indices: expected int32 or int64"
    ):
        of_unknown_rank(indices.dtype)(*given.values()).asnumpy()


@pytest.mark.parametrize("scale", [Tensor(2.0), Tensor([2.0, 3.0])], ids=["one", "two"])
def test_a_tensor_as_scale_is_refused_whatever_is_known_of_the_shapes(mode, scale):
    given = call() | {"scale": scale}
    with pytest.raises(TypeError, match="scale: expected a real number, got Tensor"):
        Model()(*given.values())
    model = Model()
    tensors = [Tensor(shape=None, dtype=ms.float32)] * 3
    tensors += [Tensor(shape=None, dtype=ms.int32), Tensor(shape=None, dtype=ms.float32)]
    model.set_inputs(*tensors, 0, scale, 0, -1)
    with pytest.raises(TypeError, match="scale: expected a real number, got Tensor"):
        model(*given.values())


class TestAddLora:
    def test_a_negative_offset_is_refused_when_it_is_made(self):
        with pytest.raises(
            mal.raw.AddLoraError, match=r"y_offset: expected 0 <= .* got -1"
        ) as refused:
            mal.AddLora(16, 16, 8, 2, y_offset=-1)
        assert refused.value.code == 561002

    def test_an_offset_that_is_no_integer(self):
        with pytest.raises(TypeError, match="y_offset: expected an integer, got float"):
            mal.AddLora(16, 16, 8, 2, y_offset=1.5)

    @pytest.mark.parametrize("dtype", [ms.float32, ms.bfloat16])
    def test_device_rounding_is_for_float16(self, dtype):
        with pytest.raises(mal.raw.AddLoraError, match="rounding: expected") as refused:
            mal.AddLora(16, 16, 8, 2, dtype=dtype, rounding="device")
        assert refused.value.code == 161002
        mal.AddLora(16, 16, 8, 2, dtype=ms.float16, rounding="device")

    @pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float32])
    def test_a_and_b_may_begin_as_tensors(self, dtype):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((2, 1, 4, 16)), rng.standard_normal((2, 1, 8, 4))
        a, b = Tensor(a, ms.float32), Tensor(b, ms.float32)
        cell = mal.AddLora(16, 8, 4, 2, dtype=dtype, a_init=a, b_init=b)
        assert cell.lora_a.dtype == cell.lora_b.dtype == dtype
        assert cell.lora_a.asnumpy().tobytes() == a.astype(dtype).asnumpy().tobytes()
        assert cell.lora_b.asnumpy().tobytes() == b.astype(dtype).asnumpy().tobytes()
        before = a.asnumpy().copy()
        cell.set_adapter(1, np.zeros((4, 16), np.float32), np.zeros((8, 4), np.float32))
        assert (a.asnumpy() == before).all(), "the caller's tensor is not the bank"

    def test_a_tensor_of_another_shape_is_refused(self):
        with pytest.raises(ValueError, match="shape"):
            mal.AddLora(16, 8, 4, 2, a_init=Tensor(np.zeros((2, 1, 4, 17), np.float32)))
