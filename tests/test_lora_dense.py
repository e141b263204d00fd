"""The LoraDense cell: a dense cell's own result and parameters, adapters by row, slices, activations."""

from __future__ import annotations

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
RNG = np.random.default_rng(5)


@pytest.fixture(params=MODES)
def mode(request):
    ms.set_context(mode=MODES[request.param])
    return request.param


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


BASES = {
    "dense": lambda: nn.Dense(24, 16),
    "without_bias": lambda: nn.Dense(24, 16, has_bias=False),
    "relu": lambda: nn.Dense(24, 16, activation="relu"),
    "gelu_cell": lambda: nn.Dense(24, 16, activation=nn.GELU()),
    "linear": lambda: mint.nn.Linear(24, 16),
    "float16": lambda: nn.Dense(24, 16, dtype=ms.float16),
}


@pytest.mark.parametrize("leading", [(6,), (6, 3)], ids=["rows", "sequence"])
@pytest.mark.parametrize("base", BASES)
def test_rows_get_their_adapters_and_base_rows_the_base_s_bits(mode, base, leading):
    dtype = np.float16 if base == "float16" else np.float32
    dense = BASES[base]()
    x = Tensor(draw(*leading, 24).astype(dtype))
    alone = dense(x).asnumpy()
    names = [parameter.name for parameter in dense.get_parameters()]
    cell = mal.nn.LoraDense(dense, rank=8, num_adapters=3)
    assert [p.name for p in cell.get_parameters() if "lora" not in p.name] == names
    a, b = draw(4, 24) / 5, draw(16, 4) / 5
    cell.set_adapter(2, a, b, scaling=0.5)
    slots = np.array([2, -1, 0, 3, 2, 7], np.int32)
    out = cell(x, Tensor(slots)).asnumpy()
    assert out.dtype == dtype
    none = slots != 2
    assert out[none].tobytes() == alone[none].tobytes()
    # The dense cell with the adapter merged into its weight says the same.
    merged = BASES[base]()
    merged.weight.set_data(Tensor((dense.weight.asnumpy() + 0.5 * b @ a).astype(dtype)))
    if dense.bias is not None:
        merged.bias.set_data(dense.bias)
    expected = merged(x).asnumpy()
    np.testing.assert_allclose(
        out[~none].astype(np.float64), expected[~none], atol=3e-2 if dtype == np.float16 else 1e-5
    )
    assert np.abs(out[~none].astype(np.float64) - alone[~none]).max() > 0.05


def test_slices(mode):
    dense = nn.Dense(24, 40)
    cell = mal.nn.LoraDense(dense, 4, 2, slices=[(0, 16), (16, 8), (32, 8)])
    a, b = [draw(4, 24), None, draw(2, 24)], [draw(16, 4), None, draw(8, 2)]
    cell.set_adapter(1, a, b, scaling=[1.0, 1.0, 2.0])
    x = draw(3, 24)
    alone = dense(Tensor(x)).asnumpy()
    out = cell(Tensor(x), Tensor(np.array([1, 0, -1], np.int32))).asnumpy()
    assert out[1:].tobytes() == alone[1:].tobytes()
    assert out[0, 16:32].tobytes() == alone[0, 16:32].tobytes()
    np.testing.assert_allclose(out[0, :16], alone[0, :16] + b[0] @ (a[0] @ x[0]), atol=1e-4)
    np.testing.assert_allclose(out[0, 32:], alone[0, 32:] + 2 * b[2] @ (a[2] @ x[0]), atol=1e-4)
    cell.set_adapter(1, [None, a[0], None], [None, b[0][:8], None])
    out = cell(Tensor(x), Tensor(np.array([1, 0, -1], np.int32))).asnumpy()
    assert out[0, :16].tobytes() == alone[0, :16].tobytes(), "a slice without an adapter is emptied"
    cell.clear_adapter(1)
    out = cell(Tensor(x), Tensor(np.array([1, 0, 1], np.int32))).asnumpy()
    assert out.tobytes() == alone.tobytes()


def banks(cell) -> bytes:
    return b"".join(parameter.asnumpy().tobytes() for parameter in cell.bank())


def test_a_refused_adapter_changes_no_slice():
    cell = mal.nn.LoraDense(nn.Dense(24, 16), 4, 2, slices=[(0, 8), (8, 8)])
    before = banks(cell)
    good = draw(4, 24), draw(8, 4)
    for a, b, scaling, words in [
        ([good[0], draw(4, 23)], [good[1], good[1]], 1.0, "slice 1: a: expected"),
        ([good[0], draw(5, 24)], [good[1], draw(8, 5)], 1.0, "slice 1: a: expected"),
        ([good[0], None], [good[1], good[1]], 1.0, "both or neither"),
        ([good[0]], [good[1], good[1]], 1.0, "a list of 2"),
        (good[0], good[1], 1.0, "a list of 2"),
        ([good[0]] * 2, [good[1]] * 2, [1.0], "one for each of 2 slices"),
        ([good[0]] * 2, [good[1]] * 2, [1.0, np.nan], "slice 1: scaling"),
    ]:
        with pytest.raises(ValueError, match=words):
            cell.set_adapter(0, a, b, scaling)
        assert banks(cell) == before
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="slot"):
            cell.set_adapter(slot, [good[0]] * 2, [good[1]] * 2)
    assert banks(cell) == before


@pytest.mark.parametrize(
    "slices", [[], [(0, 17)], [(0, 8), (4, 8)], [(8, 8), (0, 8)], [(-1, 4)], [(0, 0)]]
)
def test_slices_that_do_not_fit(slices):
    with pytest.raises(ValueError, match="slices"):
        mal.nn.LoraDense(nn.Dense(24, 16), 4, 2, slices=slices)


def test_what_is_no_dense_cell():
    with pytest.raises(TypeError, match="base: expected an nn.Dense"):
        mal.nn.LoraDense(nn.Conv2d(3, 4, 3), 4, 2)


def test_without_indices_and_without_a_route(mode):
    cell = mal.nn.LoraDense(nn.Dense(24, 16), 4, 2)
    with pytest.raises(ValueError, match="indices: expected a Tensor"):
        cell(Tensor(draw(2, 24)))
    cell(Tensor(draw(2, 24)), Tensor(np.array([0, 1], np.int32)))


def test_the_banks_are_trainable_and_the_activation_comes_back():
    dense = nn.Dense(24, 16, activation="relu")
    x = Tensor(draw(2, 24))
    before = dense(x).asnumpy()

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.d = mal.nn.LoraDense(dense, 4, 2)

    model = Model()
    names = [parameter.name for parameter in model.trainable_params()]
    assert sorted(names) == ["d.bias", "d.lora_a", "d.lora_b", "d.weight"]
    assert model.d.unwrap() is dense
    assert dense(x).asnumpy().tobytes() == before.tobytes()


KINDS = {
    "float16": (ms.float16, 1e-2),
    "bfloat16": (ms.bfloat16, 6e-2),
    "float32": (ms.float32, 1e-4),
}


@pytest.mark.parametrize(
    ("base", "bank"),
    [("float32", "float16"), ("float32", "bfloat16"), ("float16", "float32")],
)
@pytest.mark.parametrize("leading", [(4,), (4, 3)], ids=["rows", "sequence"])
@pytest.mark.parametrize("slices", [None, [(0, 8), (8, 8)]], ids=["whole", "sliced"])
def test_a_bank_of_another_dtype(mode, base, bank, leading, slices):
    dense = nn.Dense(24, 16, dtype=KINDS[base][0], activation="relu")
    x = Tensor(draw(*leading, 24), KINDS[base][0])
    alone = dense(x)
    cell = mal.nn.LoraDense(dense, 8, 3, slices, dtype=KINDS[bank][0])
    a, b = draw(4, 24) / 5, draw(16, 4) / 5
    if slices is None:
        cell.set_adapter(2, a, b, scaling=4.0)
    else:
        cell.set_adapter(2, [a, a], [b[:8], b[8:]], scaling=4.0)
    slots = np.array([2, -1, 0, 3], np.int32)
    out = cell(x, Tensor(slots))
    assert out.dtype == alone.dtype
    out, alone = out.asnumpy(), alone.asnumpy()
    assert out[[1, 3]].tobytes() == alone[[1, 3]].tobytes()
    merged = nn.Dense(24, 16, dtype=ms.float32, activation="relu")
    weight = dense.weight.asnumpy().astype(np.float32) + 4.0 * b @ a
    merged.weight.set_data(Tensor(weight))
    merged.bias.set_data(Tensor(dense.bias.asnumpy().astype(np.float32)))
    expected = merged(x.astype(ms.float32)).asnumpy()
    reach = max(KINDS[base][1], KINDS[bank][1])
    np.testing.assert_allclose(out[0].astype(np.float32), expected[0], atol=reach)
    assert np.abs(expected[0] - alone[0]).max() > 3 * reach


def test_base_rows_keep_negative_zeros_and_nans_beside_a_bank_of_another_dtype(mode):
    dense = nn.Dense(24, 16, has_bias=False)
    x = draw(2, 24)
    x[0] = -0.0
    x[1] = np.nan
    alone = dense(Tensor(x)).asnumpy()
    cell = mal.nn.LoraDense(dense, 8, 3, dtype=ms.float16)
    out = cell(Tensor(x), Tensor(np.array([-1, 3], np.int32))).asnumpy()
    assert out.tobytes() == alone.tobytes()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_computes_in_float16_over_float32_weights(mode, when):
    dense = nn.Dense(24, 16, activation="relu")
    x = Tensor(draw(3, 24))
    if when == "before":
        dense.to_float(ms.float16)
        alone = dense(x).asnumpy()
        cell = mal.nn.LoraDense(dense, 8, 3)
    else:
        cell = mal.nn.LoraDense(dense, 8, 3)
        cell.to_float(ms.float16)
        alone = cell(x, Tensor(np.full(3, -1, np.int32))).asnumpy()
    assert alone.dtype == np.float16
    a, b = draw(4, 24) / 5, draw(16, 4) / 5
    cell.set_adapter(2, a, b)
    out = cell(x, Tensor(np.array([2, -1, 7], np.int32))).asnumpy()
    assert out.dtype == np.float16
    assert out[1:].tobytes() == alone[1:].tobytes()
    weight, bias = dense.weight.asnumpy() + b @ a, dense.bias.asnumpy()
    expected = np.maximum(x.asnumpy()[0] @ weight.T + bias, 0)
    np.testing.assert_allclose(out[0].astype(np.float32), expected, atol=2e-2)
    assert np.abs(out[0].astype(np.float32) - alone[0]).max() > 0.2


def test_a_bank_of_another_dtype_learns(mode):
    cell = mal.nn.LoraDense(nn.Dense(24, 16), 8, 3, dtype=ms.float16)
    x, slots = Tensor(draw(3, 24)), Tensor(np.array([1, -1, 1], np.int32))

    def total(x):
        return cell(x, slots).sum()

    _, grads = ms.value_and_grad(total, None, [cell.lora_a, cell.lora_b])(x)
    assert np.abs(grads[1].asnumpy()[1]).max() > 0, "B begins as zeros: it must learn from there"
    assert not grads[1].asnumpy()[[0, 2]].any()


@pytest.mark.parametrize("base", ["dense", "relu", "linear"])
def test_a_vector(mode, base):
    dense = BASES[base]()
    x = Tensor(draw(24))
    alone = dense(x).asnumpy()
    cell = mal.nn.LoraDense(dense, 8, 3)
    a, b = draw(4, 24), draw(16, 4)
    cell.set_adapter(2, a, b)
    none = cell(x, Tensor(np.array([-1], np.int32))).asnumpy()
    assert none.shape == (16,)
    assert none.tobytes() == alone.tobytes()
    out = cell(x, Tensor(np.array([2], np.int32))).asnumpy()
    expected = dense.weight.asnumpy() @ x.asnumpy() + dense.bias.asnumpy() + b @ (a @ x.asnumpy())
    if base == "relu":
        expected = np.maximum(expected, 0)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
