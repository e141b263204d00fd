"""The AddLora cell: adapters in and out, both modes, checkpoints."""

from __future__ import annotations

import mindspore as ms
import mindspore_addlora as mal
import ml_dtypes
import numpy as np
import pytest
from mindspore import Tensor, nn

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32}
RNG = np.random.default_rng(11)


@pytest.fixture(params=MODES)
def mode(request):
    ms.set_context(mode=MODES[request.param])
    return request.param


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def cell_of(dtype=ms.float32, **options) -> mal.nn.AddLora:
    return mal.nn.AddLora(24, 16, 8, 3, dtype=dtype, **options)


def bits(tensor: Tensor) -> bytes:
    return tensor.asnumpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_gets_its_adapter(mode, dtype):
    cell = cell_of(DTYPES[dtype])
    adapters = {0: (draw(3, 24), draw(16, 3), 0.5), 2: (draw(8, 24), draw(16, 8), 2.0)}
    for slot, (a, b, scaling) in adapters.items():
        cell.set_adapter(slot, a, b, scaling)
    y, x = draw(5, 16), draw(5, 24)
    slots = [2, -1, 0, 3, 2]
    out = cell(
        Tensor(y, DTYPES[dtype]), Tensor(x, DTYPES[dtype]), Tensor(np.array(slots, np.int32))
    )
    out = out.asnumpy().astype(np.float64)
    # A row may differ from the exact result by the roundings of x, A, B, y and of the result.
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    for row, slot in enumerate(slots):
        exact = y[row].astype(np.float64)
        reach = np.abs(exact)
        if slot in adapters:
            a, b, scaling = adapters[slot]
            exact = exact + scaling * b.astype(np.float64) @ (a.astype(np.float64) @ x[row])
            reach = reach + 4 * scaling * np.abs(b) @ (np.abs(a) @ np.abs(x[row]))
        # 32: the float32 sums of up to 24 and 8 products.
        allowed = unit * (reach + np.abs(exact)) + 32 * 2.0**-24 * reach
        assert (np.abs(out[row] - exact) <= allowed).all()


def test_swapping_an_adapter_needs_no_recompile(mode):
    cell = cell_of()
    y, x, indices = Tensor(draw(2, 16)), Tensor(draw(2, 24)), Tensor(np.array([1, -1], np.int32))
    a, b = draw(8, 24), draw(16, 8)
    cell.set_adapter(1, a, b)
    first = bits(cell(y, x, indices))
    compiled = len(cell.compile_cache)
    cell.set_adapter(1, draw(8, 24), draw(16, 8))
    assert bits(cell(y, x, indices)) != first
    cell.clear_adapter(1)
    assert bits(cell(y, x, indices)) == bits(y)
    cell.set_adapter(1, a, b)
    assert bits(cell(y, x, indices)) == first
    assert len(cell.compile_cache) == compiled


def test_a_fresh_cell_adds_nothing(mode):
    cell = cell_of()
    y = Tensor(draw(3, 16))
    assert bits(cell(y, Tensor(draw(3, 24)), Tensor(np.array([0, 1, 2], np.int32)))) == bits(y)
    assert np.abs(cell.lora_a.asnumpy()).max() > 0, "A must not begin at zero: nothing could learn"


@pytest.mark.parametrize(
    "source", [np.float16, np.float64, ml_dtypes.bfloat16, "tensor", "bfloat16 tensor"]
)
def test_any_float_dtype_is_taken(source):
    a, b = draw(2, 24).round(1), draw(16, 2).round(1)
    cell, other = cell_of(), cell_of()
    if source == "bfloat16 tensor":
        a, b = (v.astype(ml_dtypes.bfloat16).astype(np.float32) for v in (a, b))
        cell.set_adapter(0, Tensor(a, ms.bfloat16), Tensor(b, ms.bfloat16), 0.5)
    elif source == "tensor":
        cell.set_adapter(0, Tensor(a), Tensor(b), 0.5)
    else:
        cell.set_adapter(0, a.astype(source), b.astype(source), 0.5)
        a, b = a.astype(source).astype(np.float32), b.astype(source).astype(np.float32)
    other.set_adapter(0, a, b, 0.5)
    assert bits(cell.lora_a[0]) == bits(other.lora_a[0])
    assert bits(cell.lora_b[0]) == bits(other.lora_b[0])


def test_a_numpy_view_of_a_bfloat16_tensor_goes_through_raw():
    y, x, b, a = (
        Tensor(draw(*shape), ms.bfloat16)
        for shape in ((2, 16), (2, 24), (1, 1, 16, 8), (1, 1, 8, 24))
    )
    indices = np.array([0, -1], np.int32)
    from_raw = mal.raw.add_lora(
        *(t.asnumpy() for t in (y, x, b)), indices, a.asnumpy(), limits="none"
    )
    assert from_raw.tobytes() == bits(mal.add_lora(y, x, b, Tensor(indices), a))


def test_layers_are_apart_and_clearing_empties_all(mode):
    cell = cell_of(num_layers=2)
    a, b = draw(8, 24), draw(16, 8)
    cell.set_adapter(1, a, b, layer_idx=1)
    y, x, indices = Tensor(draw(2, 16)), Tensor(draw(2, 24)), Tensor(np.array([1, 1], np.int32))
    assert bits(cell(y, x, indices, 0)) == bits(y)
    assert bits(cell(y, x, indices, 1)) != bits(y)
    cell.set_adapter(1, a, b, layer_idx=0)
    cell.clear_adapter(1)
    assert bits(cell(y, x, indices, 0)) == bits(cell(y, x, indices, 1)) == bits(y)


def test_an_offset_and_leading_dimensions(mode):
    cell = cell_of(y_offset=4, scale=2.0)
    cell.set_adapter(0, np.ones((1, 24), np.float32), np.ones((16, 1), np.float32))
    y = np.zeros((2, 3, 24), np.float32)
    out = cell(
        Tensor(y), Tensor(np.ones((2, 3, 24), np.float32)), Tensor(np.array([-1, 0], np.int32))
    )
    expected = y.copy()
    expected[1, :, 4:20] = 48.0
    assert np.array_equal(out.asnumpy(), expected)


REFUSALS = {
    "slot too high": (
        lambda c: c.set_adapter(3, draw(2, 24), draw(16, 2)),
        ValueError,
        "slot: expected 0 <= slot < 3, got 3",
    ),
    "slot negative": (
        lambda c: c.set_adapter(-1, draw(2, 24), draw(16, 2)),
        ValueError,
        "slot: .*got -1",
    ),
    "slot not an integer": (
        lambda c: c.set_adapter(1.0, draw(2, 24), draw(16, 2)),
        TypeError,
        "slot: .*float",
    ),
    "layer too high": (
        lambda c: c.set_adapter(0, draw(2, 24), draw(16, 2), layer_idx=1),
        ValueError,
        "layer_idx: .*got 1",
    ),
    "rank too high": (
        lambda c: c.set_adapter(0, draw(9, 24), draw(16, 9)),
        ValueError,
        r"a: .*r <= 8.*\[9, 24\]",
    ),
    "rank zero": (
        lambda c: c.set_adapter(0, draw(0, 24), draw(16, 0)),
        ValueError,
        r"a: .*\[0, 24\]",
    ),
    "a too narrow": (
        lambda c: c.set_adapter(0, draw(2, 23), draw(16, 2)),
        ValueError,
        r"a: .*24.*\[2, 23\]",
    ),
    "b of another rank": (
        lambda c: c.set_adapter(0, draw(2, 24), draw(16, 3)),
        ValueError,
        r"b: expected \[16, 2\].*\[16, 3\]",
    ),
    "b too short": (
        lambda c: c.set_adapter(0, draw(2, 24), draw(15, 2)),
        ValueError,
        r"b: expected \[16, 2\].*\[15, 2\]",
    ),
    "three dimensions": (
        lambda c: c.set_adapter(0, draw(1, 2, 24), draw(16, 2)),
        ValueError,
        r"a: .*\[1, 2, 24\]",
    ),
    "integers": (
        lambda c: c.set_adapter(0, np.ones((2, 24), int), draw(16, 2)),
        TypeError,
        "a: .*int64",
    ),
    "a list": (lambda c: c.set_adapter(0, [[1.0] * 24], draw(16, 1)), TypeError, "a: .*list"),
    "scaling not finite": (
        lambda c: c.set_adapter(0, draw(2, 24), draw(16, 2), float("nan")),
        ValueError,
        "scaling: .*nan",
    ),
    "cleared slot too high": (lambda c: c.clear_adapter(3), ValueError, "slot: .*got 3"),
    "cleared slot negative": (lambda c: c.clear_adapter(-1), ValueError, "slot: .*got -1"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_adapter_changes_nothing(name):
    action, kind, message = REFUSALS[name]
    cell = cell_of()
    for slot in range(3):
        cell.set_adapter(slot, draw(8, 24), draw(16, 8))
    before = bits(cell.lora_a), bits(cell.lora_b)
    with pytest.raises(kind, match=message):
        action(cell)
    assert (bits(cell.lora_a), bits(cell.lora_b)) == before


def test_what_float16_cannot_hold_is_refused():
    cell = cell_of(ms.float16)
    before = bits(cell.lora_b)
    with pytest.raises(ValueError, match="b: .*float16 can hold"):
        cell.set_adapter(0, draw(2, 24), np.full((16, 2), 600.0, np.float32), scaling=200.0)
    assert bits(cell.lora_b) == before


@pytest.mark.parametrize(("value", "scaling"), [(1e39, 1.0), (1e40, 1e-10)])
def test_what_float32_cannot_hold_is_refused(value, scaling):
    cell = cell_of(ms.float32)
    b = np.full((16, 2), value)
    b[0] = np.inf  # an infinity beside it hides nothing
    with pytest.raises(ValueError, match="b: .*float32 can hold"):
        cell.set_adapter(0, draw(2, 24), b, scaling)


def test_a_numpy_integer_as_scale_is_a_number(mode):
    cell, other = cell_of(scale=np.int32(2)), cell_of(scale=2.0)
    a, b, y, x = draw(2, 24), draw(16, 2), Tensor(draw(2, 16)), Tensor(draw(2, 24))
    for each in (cell, other):
        each.set_adapter(0, a, b)
    indices = Tensor(np.array([0, -1], np.int32))
    assert bits(cell(y, x, indices)) == bits(other(y, x, indices))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rank": 0}, ValueError, "rank: .*got 0"),
        ({"num_adapters": -1}, ValueError, "num_adapters: .*got -1"),
        ({"in_features": 2.0}, TypeError, "in_features: .*float"),
        ({"dtype": ms.int32}, TypeError, "dtype: "),
        ({"rounding": "none"}, ValueError, "rounding: .*'none'"),
    ],
)
def test_the_constructor_refuses(options, kind, message):
    arguments = {"in_features": 8, "out_features": 4, "rank": 2, "num_adapters": 1} | options
    with pytest.raises(kind, match=message):
        mal.nn.AddLora(**arguments)


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints(mode, tmp_path, form, dtype):
    cell = cell_of(DTYPES[dtype])
    cell.set_adapter(1, draw(4, 24), draw(16, 4))
    path = str(tmp_path / f"bank.{form}")
    ms.save_checkpoint(cell, path, format=form)
    other = cell_of(DTYPES[dtype])
    missing, surplus = ms.load_param_into_net(other, ms.load_checkpoint(path, format=form))
    assert (missing, surplus) == ([], [])
    assert bits(other.lora_a) == bits(cell.lora_a)
    assert bits(other.lora_b) == bits(cell.lora_b)
    y, x = Tensor(draw(2, 16), DTYPES[dtype]), Tensor(draw(2, 24), DTYPES[dtype])
    indices = Tensor(np.array([1, 0], np.int32))
    assert bits(other(y, x, indices)) == bits(cell(y, x, indices))


def test_the_bank_is_trainable_parameters_with_stable_names():
    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.lora = cell_of()

        def construct(self, y, x, indices):
            return self.lora(y, x, indices)

    names = [parameter.name for parameter in Model().trainable_params()]
    assert names == ["lora.lora_a", "lora.lora_b"]


def test_a_cell_inside_a_compiled_model(mode):
    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first = nn.Dense(24, 16)
            self.lora = cell_of()

        def construct(self, x, indices):
            return self.lora(self.first(x), x, indices)

    model = Model()
    x, none = Tensor(draw(2, 24)), Tensor(np.array([-1, -1], np.int32))
    base = bits(model.first(x))
    assert bits(model(x, none)) == base
    model.lora.set_adapter(0, draw(2, 24), draw(16, 2))
    routed = model(x, Tensor(np.array([-1, 0], np.int32))).asnumpy()
    assert routed[0].tobytes() == base[: routed[0].nbytes]
    assert routed[1].tobytes() != base[routed[0].nbytes :]


def test_a_bank_begins_as_what_was_given(mode):
    for dtype in DTYPES.values():
        given = Tensor(draw(3, 1, 8, 24))
        cell = cell_of(dtype, a_init=given, b_init=1.0)
        assert cell.lora_a.dtype == dtype
        assert bits(cell.lora_a) == bits(given.astype(dtype))
        assert (cell.lora_b.float().asnumpy() == 1).all()
        before = bits(given)
        cell.set_adapter(0, draw(8, 24), draw(16, 8))
        assert bits(given) == before
    with pytest.raises(ValueError, match="shape"):
        cell_of(a_init=Tensor(draw(3, 8, 24)))


def test_a_bank_held_for_the_npu_is_refused_on_the_cpu(mode, monkeypatch):
    # What a script does that makes its cells and then calls set_device("CPU") where there is an NPU.
    known = ms.get_context
    with monkeypatch.context() as patch:
        patch.setattr(
            ms,
            "get_context",
            lambda name: "Ascend" if name == "device_target" else known(name),
        )
        cell = mal.nn.AddLora(32, 16, 16, 3, dtype=ms.float32)
    tensors = Tensor(draw(2, 16)), Tensor(draw(2, 32)), Tensor(np.zeros(2, np.int32))
    with pytest.raises(RuntimeError, match="was made for Ascend, and device_target is CPU now"):
        cell(*tensors)
