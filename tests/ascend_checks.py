"""The checks of test_ascend.py. Prints "ok NAME" or "FAILED NAME: reason" for each."""

from __future__ import annotations

import os
import sys
import traceback

import emulated_cann
import ml_dtypes
import mindspore as ms
import mindspore_addlora as mal
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore_addlora import raw

CONTROL = emulated_cann.Control(os.environ["EMU_BUILD"])
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def problem(b=7, h1=32, h2=16, h3=48, r=16, w=4, layers=2, with_a=True, seed=1):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float16)
    indices = (np.arange(b) * 3 % (w + 2) - 1).astype(np.int32)
    return {
        "y": draw(b, h3),
        "x": draw(b, h1 if with_a else r),
        "weight_b": draw(w, layers, h2, r) / np.float16(4),
        "indices": indices,
        "weight_a": draw(w, layers, r, h1) / np.float16(4) if with_a else None,
    }


def near(result, expected):
    """The device's rounding points, with float32 sums in another order."""
    result, expected = result.astype(np.float64), expected.astype(np.float64)
    assert result.shape == expected.shape
    assert (np.abs(result - expected) <= 2**-9 * (1 + np.abs(expected))).all(), np.abs(
        result - expected
    ).max()


class Model(nn.Cell):
    def __init__(self, p, **scalars):
        super().__init__()
        self.b = Parameter(Tensor(p["weight_b"]), name="b")
        self.has_a = p["weight_a"] is not None
        self.a = Parameter(Tensor(p["weight_a"]), name="a") if self.has_a else None
        self.layer_idx = scalars.get("layer_idx", 1)
        self.scale = scalars.get("scale", 0.5)
        self.y_offset = scalars.get("y_offset", 16)

    def construct(self, y, x, indices):
        if self.has_a:
            return mal.add_lora(
                y, x, self.b, indices, self.a, self.layer_idx, self.scale, self.y_offset
            )
        return mal.add_lora(y, x, self.b, indices, None, self.layer_idx, self.scale, self.y_offset)


def expected(p, layer_idx=1, scale=0.5, y_offset=16):
    return raw.add_lora(
        **p, layer_idx=layer_idx, scale=scale, y_offset=y_offset, limits="none", rounding="device"
    )


def same_as_cpu(p, **scalars):
    y = Tensor(p["y"])
    out = Model(p, **scalars)(y, Tensor(p["x"]), Tensor(p["indices"])).asnumpy()
    near(out, expected(p, **scalars))
    none = (p["indices"] < 0) | (p["indices"] >= p["weight_b"].shape[0])
    assert out[none].tobytes() == p["y"][none].tobytes()
    assert y.asnumpy().tobytes() == p["y"].tobytes(), "y was changed"


@check
def plain(mode):
    same_as_cpu(problem())


@check
def without_weight_a(mode):
    same_as_cpu(problem(with_a=False))


@check
def a_rank_that_is_no_multiple_of_16_is_padded(mode):
    same_as_cpu(problem(r=5))


@check
def the_same_without_weight_a(mode):
    same_as_cpu(problem(r=24, with_a=False))


@check
def a_rank_above_128_is_split(mode):
    p = problem(r=200)
    out = Model(p)(*(Tensor(p[n]) for n in ("y", "x", "indices"))).asnumpy()
    # Two parts, each rounded where the device rounds.
    exact = raw.add_lora(**p, layer_idx=1, scale=0.5, y_offset=16, limits="none")
    assert (
        np.abs(out.astype(np.float64) - exact) <= 2**-7 * (1 + np.abs(exact.astype(np.float64)))
    ).all()


@check
def more_than_32_adapters_are_split(mode):
    p = problem(b=12, w=70)
    p["indices"] = np.array([0, 31, 32, 33, 63, 64, 69, 70, -1, 71, 5, 2**31 - 1], np.int32)
    tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
    out = Model(p)(*tensors).asnumpy()
    p["indices"][p["indices"] > 70] = -1
    near(out, expected(p))


@check
def more_than_32_layers_are_sliced(mode):
    same_as_cpu(problem(layers=40), layer_idx=37)


@check
def indices_above_w_are_no_adapter(mode):
    p = problem()
    model = Model(p)
    bad = np.array([5, 6, 100, 2**31 - 1, 5, 4, -7], np.int32)
    out = model(Tensor(p["y"]), Tensor(p["x"]), Tensor(bad)).asnumpy()
    assert out.tobytes() == p["y"].tobytes()
    near(model(Tensor(p["y"]), Tensor(p["x"]), Tensor(p["indices"])).asnumpy(), expected(p))
    assert CONTROL.misuse("index_above_w") == 0


@check
def int64_indices(mode):
    p = problem()
    wide = p["indices"].astype(np.int64)
    wide[0] = 2**32 + 1
    wide[1] = -(2**32)
    p["indices"][:2] = -1
    out = Model(p)(Tensor(p["y"]), Tensor(p["x"]), Tensor(wide)).asnumpy()
    near(out, expected(p))


@check
def leading_dimensions_with_an_index_for_each_batch_row(mode):
    p = problem(b=6)
    model = Model(p)
    indices = np.array([2, -1], np.int32)
    out = model(Tensor(p["y"].reshape(2, 3, 48)), Tensor(p["x"].reshape(2, 3, 32)), Tensor(indices))
    assert out.shape == (2, 3, 48)
    p["indices"] = np.repeat(indices, 3)
    near(out.asnumpy().reshape(6, 48), expected(p))


@check
def leading_dimensions_with_an_index_for_each_token(mode):
    p = problem(b=6)
    out = Model(p)(
        Tensor(p["y"].reshape(2, 3, 48)),
        Tensor(p["x"].reshape(2, 3, 32)),
        Tensor(p["indices"].reshape(2, 3)),
    )
    near(out.asnumpy().reshape(6, 48), expected(p))


@check
def bfloat16_runs_the_delta_in_float16(mode):
    p = problem()
    q = {n: v if n == "indices" else v.astype(ml_dtypes.bfloat16) for n, v in p.items()}

    class Bfloat16(Model):
        def __init__(self):
            super().__init__(p)
            self.a = Parameter(Tensor(p["weight_a"], ms.bfloat16), name="a")
            self.b = Parameter(Tensor(p["weight_b"], ms.bfloat16), name="b")

    out = Bfloat16()(Tensor(p["y"], ms.bfloat16), Tensor(p["x"], ms.bfloat16), Tensor(p["indices"]))
    assert out.dtype == ms.bfloat16
    exact = raw.add_lora(**q, layer_idx=1, scale=0.5, y_offset=16, limits="none")
    difference = np.abs(out.float().asnumpy() - exact.astype(np.float32))
    assert (difference <= 2**-6 * (1 + np.abs(exact.astype(np.float32)))).all()


@check
def float32_runs_the_products_in_float16(mode):
    p = problem()
    q = {n: v if n == "indices" else v.astype(np.float32) for n, v in p.items()}
    out = mal.add_lora(*(Tensor(v) for v in q.values()), layer_idx=1, scale=0.5, y_offset=16)
    exact = raw.add_lora(**q, layer_idx=1, scale=0.5, y_offset=16, limits="none")
    assert (np.abs(out.asnumpy() - exact) <= 2**-9 * (1 + np.abs(exact))).all()
    none = (p["indices"] < 0) | (p["indices"] >= 4)
    assert out.asnumpy()[none].tobytes() == q["y"][none].tobytes()


@check
def base_rows_keep_their_bits_in_every_dtype(mode):
    for dtype, bits in (
        (np.float16, np.uint16),
        (ml_dtypes.bfloat16, np.uint16),
        (np.float32, np.uint32),
    ):
        p = {n: v if n == "indices" else v.astype(dtype) for n, v in problem().items()}
        # -0, and NaNs of every kind: quiet, signalling, with a sign and a payload.
        top = 8 * np.dtype(dtype).itemsize
        infinity = {np.float16: 0x7C00, ml_dtypes.bfloat16: 0x7F80, np.float32: 0x7F800000}[dtype]
        p["y"].view(bits)[:, :4] = [
            1 << (top - 1),
            infinity + 1,
            infinity | (infinity >> 1) | 5,
            (1 << (top - 1)) | (infinity + 3),
        ]
        name = {np.float16: ms.float16, ml_dtypes.bfloat16: ms.bfloat16, np.float32: ms.float32}[
            dtype
        ]
        tensors = [Tensor(v) if n == "indices" else Tensor(v, name) for n, v in p.items()]
        out = mal.add_lora(*tensors, layer_idx=1, scale=0.5, y_offset=16)
        none = (p["indices"] < 0) | (p["indices"] >= 4)
        assert out.asnumpy()[none].tobytes() == tensors[0].asnumpy()[none].tobytes(), dtype


@check
def a_chain_whose_middle_is_returned_too(mode):
    p = problem()

    class Chain(Model):
        def construct(self, y, x, indices):
            first = mal.add_lora(y, x, self.b, indices, self.a, 1, 0.5, 16)
            return first, mal.add_lora(first, x, self.b, indices, self.a, 0, 0.5, 16), y * 1

    first, second, y = Chain(p)(*(Tensor(p[n]) for n in ("y", "x", "indices")))
    near(first.asnumpy(), expected(p))
    assert y.asnumpy().tobytes() == p["y"].tobytes()
    p["y"] = first.asnumpy()
    near(second.asnumpy(), expected(p, layer_idx=0))


@check
def under_ms_jit(mode):
    p = problem()

    @ms.jit
    def step(y, x, b, indices, a):
        return mal.add_lora(y, x, b, indices, a, 1, 0.5, 16)

    near(step(*(Tensor(v) for v in p.values())).asnumpy(), expected(p))


@check
def a_dynamic_batch(mode):
    p = problem()
    model = Model(p)
    model.set_inputs(
        Tensor(shape=[None, 48], dtype=ms.float16),
        Tensor(shape=[None, 32], dtype=ms.float16),
        Tensor(shape=[None], dtype=ms.int32),
    )
    want = expected(p)
    for n in (7, 3, 5):
        out = model(Tensor(p["y"][:n]), Tensor(p["x"][:n]), Tensor(p["indices"][:n]))
        near(out.asnumpy(), want[:n])


@check
def dynamic_shapes_that_do_not_agree_are_named(mode):
    # Without weight_a CANN does not compare R with the columns of x: it would read beyond them.
    for with_a, name, columns in ((False, "x", 16), (False, "x", 48), (True, "weight_a", 16)):
        p = problem(r=32, with_a=with_a)
        model = Model(p)
        model.set_inputs(
            Tensor(shape=[None, 48], dtype=ms.float16),
            Tensor(shape=[None, None], dtype=ms.float16),
            Tensor(shape=[None], dtype=ms.int32),
        )
        x = np.ones((7, columns), np.float16)
        calls = CONTROL.calls("aclnnAddLora.kernel")
        try:
            model(Tensor(p["y"]), Tensor(x), Tensor(p["indices"])).asnumpy()
        except (RuntimeError, ValueError) as error:
            assert f"{name}: expected [" in str(error), error
        else:
            raise AssertionError(f"x with {columns} columns was accepted")
        assert CONTROL.calls("aclnnAddLora.kernel") == calls


@check
def widths_that_are_no_multiple_of_16_are_refused(mode):
    for sizes, name in (({"h1": 24}, "H1"), ({"h2": 20}, "H2"), ({"h3": 50}, "H3")):
        p = problem(**sizes)
        try:
            Model(p)(*(Tensor(p[n]) for n in ("y", "x", "indices")))
        except raw.AddLoraError as error:
            assert f"{name} a multiple of 16 on the NPU" in str(error), error
        else:
            raise AssertionError(f"{name} was accepted")


@check
def a_rule_is_refused_before_cann_sees_the_call(mode):
    p = problem()
    calls = CONTROL.calls("aclnnAddLoraGetWorkspaceSize")
    try:
        Model(p, layer_idx=2)(*(Tensor(p[n]) for n in ("y", "x", "indices")))
    except raw.AddLoraError as error:
        assert "layer_idx" in str(error)
    else:
        raise AssertionError("accepted")
    assert CONTROL.calls("aclnnAddLoraGetWorkspaceSize") == calls


@check
def the_cell_with_two_layers_in_one_bank(mode):
    p = problem()
    cell = mal.nn.AddLora(32, 16, 16, 4, num_layers=2, y_offset=16, scale=0.5)
    for slot in range(4):
        for layer in range(2):
            cell.set_adapter(
                slot, p["weight_a"][slot, layer], p["weight_b"][slot, layer], layer_idx=layer
            )

    class Twice(nn.Cell):
        def __init__(self):
            super().__init__()
            self.lora = cell

        def construct(self, y, x, indices):
            first = self.lora(y, x, indices, 0)
            return first, self.lora(first, x, indices, 1)

    model = Twice()
    tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
    for _ in range(2):
        first, second = model(*tensors)
        near(first.asnumpy(), expected(p, layer_idx=0))
        q = p | {"y": first.asnumpy()}
        near(second.asnumpy(), expected(q, layer_idx=1))
        # Another adapter in a slot: the compiled model sees it.
        p["weight_a"][2] = 0
        for layer in range(2):
            cell.set_adapter(2, p["weight_a"][2, layer], p["weight_b"][2, layer], layer_idx=layer)


def a_cell_of(p, dtype=ms.float16):
    """The adapters of a problem in a cell; ones of lower rank padded."""
    w, layers, h2, r = p["weight_b"].shape
    cell = mal.nn.AddLora(32, h2, r, w, num_layers=layers, y_offset=16, scale=0.5, dtype=dtype)
    for slot in range(w):
        for layer in range(layers):
            cell.set_adapter(
                slot, p["weight_a"][slot, layer], p["weight_b"][slot, layer], layer_idx=layer
            )
    return cell


COPIES = ("aclnnConstantPadNd", "aclnnCast", "aclnnInplaceCopy", "StridedSlice")


def copies_of(call):
    """How often each of the copying operators runs in a call of a model that has run before."""
    call()
    before = {name: CONTROL.calls(name) for name in COPIES}
    call()
    return {name: CONTROL.calls(name) - before[name] for name in COPIES}


@check
def the_cell_holds_its_bank_padded_and_copies_no_weight(mode):
    plain = problem()
    model = Model(plain)
    tensors = [Tensor(plain[n]) for n in ("y", "x", "indices")]
    # Rank 16, two layers, four adapters: y and the indices are copied, and no weight.
    necessary = copies_of(lambda: model(*tensors).asnumpy())
    assert necessary["aclnnConstantPadNd"] == necessary["StridedSlice"] == 0
    for sizes in ({"r": 5}, {"r": 5, "w": 70}, {"r": 5, "layers": 40}, {"r": 200}):
        p = problem(**sizes)
        cell = a_cell_of(p)
        tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
        calls = -(-p["weight_b"].shape[0] // 32) * -(-p["weight_b"].shape[3] // 128)
        copies = copies_of(lambda cell=cell, tensors=tensors: cell(*tensors, 1).asnumpy())
        for name in COPIES:
            assert copies[name] <= calls * necessary[name], (sizes, copies, necessary)


@check
def the_cell_with_a_rank_above_128(mode):
    p = problem(r=200)
    out = a_cell_of(p)(*(Tensor(p[n]) for n in ("y", "x", "indices")), 1).asnumpy()
    exact = raw.add_lora(**p, layer_idx=1, scale=0.5, y_offset=16, limits="none")
    assert (
        np.abs(out.astype(np.float64) - exact) <= 2**-7 * (1 + np.abs(exact.astype(np.float64)))
    ).all()


@check
def the_cell_with_many_adapters_and_layers(mode):
    p = problem(b=12, w=70, layers=34, r=5)
    p["indices"] = np.array([0, 31, 32, 33, 63, 64, 69, 70, -1, 71, 5, 2**31 - 1], np.int32)
    cell = a_cell_of(p)
    tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
    p["indices"][p["indices"] > 70] = -1
    for layer in (0, 31, 32, 33):
        near(cell(*tensors, layer).asnumpy(), expected(p, layer_idx=layer))
    cell.clear_adapter(33)
    p["weight_b"][33] = 0
    near(cell(*tensors, 33).asnumpy(), expected(p, layer_idx=33))


@check
def a_bank_that_begins_as_ones_or_as_a_tensor(mode):
    for r in (5, 130):
        given = Tensor(np.ones((40, 2, r, 32), np.float32))
        for a_init in ("ones", given):
            cell = mal.nn.AddLora(32, 16, r, 40, 2, y_offset=16, a_init=a_init, b_init="ones")
            p = problem(w=40)
            x = np.full_like(p["x"], 2**-7)
            out = cell(Tensor(p["y"]), Tensor(x), Tensor(p["indices"]), 1).asnumpy()
            # The padding adds nothing: R ranks, each 32 * 2^-7.
            p["y"][p["indices"] >= 0, 16:32] += np.float16(r / 4)
            near(out, p["y"])


@check
def checkpoints_of_several_cells(mode):
    p = problem(w=40, r=200, layers=33)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.one = mal.nn.AddLora(32, 16, 200, 40, 33, y_offset=16, b_init="normal")
            self.two = mal.nn.AddLora(32, 16, 5, 40, b_init="normal")

        def construct(self, y, x, indices):
            return self.two(self.one(y, x, indices, 32), x, indices, 0)

    tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
    net, other = Net(), Net()
    names = [parameter.name for parameter in net.trainable_params()]
    assert len(set(names)) == len(names) == 20, names
    out = net(*tensors).asnumpy().tobytes()
    assert other(*tensors).asnumpy().tobytes() != out
    ms.save_checkpoint(net, "net.ckpt")
    assert ms.load_param_into_net(other, ms.load_checkpoint("net.ckpt")) == ([], [])
    assert other(*tensors).asnumpy().tobytes() == out


@check
def the_cell_in_bfloat16_holds_float16(mode):
    p = problem(r=5)
    q = {n: v if n == "indices" else v.astype(ml_dtypes.bfloat16) for n, v in p.items()}
    cell = a_cell_of(q, ms.bfloat16)
    assert cell.lora_a.dtype == ms.float16
    tensors = Tensor(p["y"], ms.bfloat16), Tensor(p["x"], ms.bfloat16), Tensor(p["indices"])
    out = cell(*tensors, 1)
    assert out.dtype == ms.bfloat16
    exact = raw.add_lora(**q, layer_idx=1, scale=0.5, y_offset=16, limits="none")
    difference = np.abs(out.float().asnumpy() - exact.astype(np.float32))
    assert (difference <= 2**-6 * (1 + np.abs(exact.astype(np.float32)))).all()
    try:
        cell(Tensor(p["y"]), *tensors[1:], 1)
    except raw.AddLoraError as error:
        assert "bfloat16" in str(error) and "float16" in str(error), error
    else:
        raise AssertionError("float16 rows of y were accepted by a bfloat16 cell")


@check
def the_cell_refuses_widths_when_it_is_made(mode):
    for sizes, name in (((24, 16), "H1"), ((32, 20), "H2"), ((49168, 16), "H1 <= 49152")):
        try:
            mal.nn.AddLora(*sizes, 16, 4)
        except raw.AddLoraError as error:
            assert name in str(error), error
        else:
            raise AssertionError(f"{name} was accepted")


@check
def a_failure_of_cann_has_its_code_and_text_and_the_next_call_works(mode):
    p = problem()
    model = Model(p)
    tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
    near(model(*tensors).asnumpy(), expected(p))
    # An executor that was planned once is used again: only its second phase runs.
    CONTROL.fail("aclnnAddLora", 561000, "E561000: the reason of this check")
    try:
        model(*tensors).asnumpy()
    except RuntimeError as error:
        assert "the reason of this check" in str(error), error
        assert "aclnnAddLora" in str(error), error
    else:
        raise AssertionError("no failure")
    finally:
        CONTROL.clear_failures()
    works_again(model, mode, p, tensors)


def works_again(model, mode, p, tensors):
    """After a kernel failed, MindSpore refuses every later step of that compiled graph: there, another one works."""
    if mode == "graph":
        model = Model(p)
    near(model(*tensors).asnumpy(), expected(p))


@check
def a_failure_of_the_first_phase(mode):
    p = problem(b=11)
    model = Model(p)
    tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
    CONTROL.fail("aclnnAddLoraGetWorkspaceSize", 561002, "E561002: the reason of this check")
    try:
        model(*tensors).asnumpy()
    except RuntimeError as error:
        assert "the reason of this check" in str(error), error
    else:
        raise AssertionError("no failure")
    finally:
        CONTROL.clear_failures()
    works_again(model, mode, p, tensors)


@check
def the_device_failing_while_it_runs(mode):
    p = problem(b=10)
    model = Model(p)
    tensors = [Tensor(p[n]) for n in ("y", "x", "indices")]
    near(model(*tensors).asnumpy(), expected(p))
    CONTROL.fail("aclnnAddLora.kernel", 507015, "EZ9999: the reason of this check")
    try:
        model(*tensors).asnumpy()
        ms.runtime.synchronize()
    except RuntimeError as error:
        assert "the reason of this check" in str(error) or "507015" in str(error), error
    else:
        raise AssertionError("no failure")
    finally:
        CONTROL.clear_failures()
    works_again(model, mode, p, tensors)


def sizes_of_gradients(p, g, layer_idx=1, scale=0.5, y_offset=16):
    """The gradients in float64."""
    w, _, h2, _ = p["weight_b"].shape
    x, b = p["x"].astype(np.float64), p["weight_b"].astype(np.float64)
    a = None if p["weight_a"] is None else p["weight_a"].astype(np.float64)
    s = g.astype(np.float64)[:, y_offset : y_offset + h2]
    exact = {"x": np.zeros_like(x), "weight_b": np.zeros_like(b)}
    if a is not None:
        exact["weight_a"] = np.zeros_like(a)
    for row, index in enumerate(p["indices"]):
        if not 0 <= index < w:
            continue
        at = (index, layer_idx)
        z, dz = x[row] if a is None else a[at] @ x[row], s[row] @ b[at]
        exact["weight_b"][at] += scale * np.outer(s[row], z)
        exact["x"][row] = scale * (dz if a is None else dz @ a[at])
        if a is not None:
            exact["weight_a"][at] += scale * np.outer(dz, x[row])
    return exact


@check
def gradients_are_the_formula_s(mode):
    for options in ({}, {"with_a": False}, {"r": 5}, {"w": 34, "b": 11}, {"r": 144}):
        p = problem(**options)
        g = np.random.default_rng(3).standard_normal(p["y"].shape).astype(np.float16)
        names = [n for n in ("y", "x", "weight_b", "indices", "weight_a") if p[n] is not None]

        class Loss(nn.Cell):
            def construct(self, y, x, weight_b, indices, weight_a=None):
                out = mal.add_lora(y, x, weight_b, indices, weight_a, 1, 0.5, 16)
                return ms.mint.sum(out * Tensor(g))

        wanted = tuple(i for i, n in enumerate(names) if n != "indices")
        found = ms.grad(Loss(), grad_position=wanted)(*(Tensor(p[n]) for n in names))
        exact = sizes_of_gradients(p, g)
        for position, value in zip(wanted, found, strict=True):
            name = names[position]
            value = value.asnumpy().astype(np.float64)
            if name == "y":
                assert (value == g).all()
                continue
            # Some products of float16 one after the other, each rounded.
            reach = 2**-7 * (1 + np.abs(exact[name]).max())
            assert (np.abs(value - exact[name]) <= reach).all(), (options, name)
            assert not value[np.abs(exact[name]) == 0].any(), "what no row uses is zero"


@check
def frozen_inputs_cost_nothing_in_pynative(mode):
    if mode != "pynative":
        return  # a graph drops what nobody uses
    from mindspore_addlora.ascend import gradients

    ran = []
    for name in ("_product", "_sums"):

        def counted(*arguments, name=name, real=getattr(gradients, name)):
            ran.append(name)
            return real(*arguments)

        setattr(gradients, name, counted)
    products = {"x": ["_product"] * 2, "weight_b": ["_product", "_sums"]}
    products["weight_a"] = ["_product", "_sums"]
    p = problem()
    g = np.random.default_rng(3).standard_normal(p["y"].shape).astype(np.float16)
    exact = sizes_of_gradients(p, g)
    for wanted, expected in products.items():
        tensors = {n: Parameter(Tensor(p[n]), name=n, requires_grad=n == wanted) for n in products}

        def loss(y, t=tensors):
            indices = Tensor(p["indices"])
            out = mal.add_lora(y, t["x"], t["weight_b"], indices, t["weight_a"], 1, 0.5, 16)
            return ms.mint.sum(out * Tensor(g))

        ran.clear()
        _, (found,) = ms.grad(loss, 0, [tensors[wanted]])(Tensor(p["y"]))
        assert sorted(ran) == expected, (wanted, ran)
        reach = 2**-7 * (1 + np.abs(exact[wanted]).max())
        assert (np.abs(found.asnumpy().astype(np.float64) - exact[wanted]) <= reach).all(), wanted


@check
def a_cell_is_trained(mode):
    p = problem(r=5)
    cell = a_cell_of(p, ms.float32)
    parameters = ms.ParameterTuple(cell.trainable_params())
    y, x = Tensor(p["y"].astype(np.float32)), Tensor(p["x"].astype(np.float32))
    indices, target = Tensor(p["indices"]), Tensor(np.zeros_like(p["y"], np.float32))

    def loss(y, x, indices):
        difference = cell(y, x, indices, 1) - target
        return ms.mint.sum(difference * difference) / 100

    step = ms.value_and_grad(loss, None, parameters)
    losses = []
    for _ in range(4):
        value, found = step(y, x, indices)
        for parameter, gradient in zip(parameters, found, strict=True):
            # The optimizers' own kernels are not emulated.
            parameter.set_data(parameter - gradient * 0.05)
        losses.append(float(value.asnumpy()))
    assert losses[-1] < losses[0], losses


class Projections(nn.Cell):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Dense(32, 48, dtype=ms.float16)
        self.up = nn.Dense(48, 32, dtype=ms.float16, activation="relu")

    def construct(self, x):
        return self.up(self.q_proj(x))


@check
def a_model_with_multi_lora(mode):
    rng = np.random.default_rng(4)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32) / 6
    weights = {
        "q_proj": mal.peft.LoraWeights(draw(5, 32), draw(48, 5), 0.5, 5),
        "up": mal.peft.LoraWeights(draw(3, 48), draw(32, 3), 2.0, 3),
    }
    model = Projections()
    x = rng.standard_normal((3, 32)).astype(np.float16)
    base = model(Tensor(x)).asnumpy()
    lora = mal.MultiLora(model, ["q_proj", "up"], max_rank=8, num_adapters=3)
    for name in "ab":
        mal.peft.write_adapter(name, weights)
        lora.load_adapter(name, name)
    lora.route(["b", None, "b"])
    out = model(Tensor(x)).asnumpy()
    assert out[1].tobytes() == base[1].tobytes()

    def dense(cell, value, one):
        merged = cell.weight.asnumpy().astype(np.float64) + one.scaling * one.b @ one.a
        return value @ merged.T + cell.bias.asnumpy()

    expected_out = np.maximum(
        dense(
            model.up,
            dense(model.q_proj, x[::2].astype(np.float64), weights["q_proj"]),
            weights["up"],
        ),
        0,
    )
    assert (np.abs(out[::2] - expected_out) <= 2**-7 * (1 + np.abs(expected_out))).all()
    lora.route([])
    lora.delete_adapter("b")
    lora.route(["a"])
    again = model(Tensor(x)).asnumpy()
    assert again[0].tobytes() == out[0].tobytes() and again[1:].tobytes() == base[1:].tobytes()
    with lora.step([None, "a"]):
        assert model(Tensor(x)).asnumpy()[0].tobytes() == base[0].tobytes()
    lora.detach()
    assert model(Tensor(x)).asnumpy().tobytes() == base.tobytes()


@check
def a_bank_of_another_dtype_than_the_cell_computes_in(mode):
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((5, 32)) / 6, rng.standard_normal((48, 5)) / 6
    x = rng.standard_normal((3, 32)).astype(np.float32)
    x[1] = -0.0
    dense = nn.Dense(32, 48, has_bias=False)
    base = dense(Tensor(x)).asnumpy()
    cell = mal.nn.LoraDense(dense, 8, 3, dtype=ms.float16)
    cell.set_adapter(2, a, b)
    out = cell(Tensor(x), Tensor(np.array([2, -1, 3], np.int32))).asnumpy()
    assert out[1:].tobytes() == base[1:].tobytes()
    want = base[0] + b @ (a @ x[0])
    assert (np.abs(out[0] - want) <= 2**-8 * (1 + np.abs(want))).all()


@check
def raw_on_tensors_of_mindspore(mode):
    p = problem()
    tensors = {name: Tensor(value) + 0 for name, value in p.items()}
    out = Tensor(np.zeros_like(p["y"])) + 0
    ms.runtime.synchronize()

    def at(tensor):
        return raw.device_tensor(tensor.data_ptr(), tensor.shape, tensor.dtype)

    raw.add_lora(
        **{name: at(tensor) for name, tensor in tensors.items()},
        layer_idx=1,
        scale=0.5,
        y_offset=16,
        out=at(out),
    )
    near(out.asnumpy(), expected(p))
    assert tensors["y"].asnumpy().tobytes() == p["y"].tobytes()


def main() -> int:
    ms.set_device("Ascend", 0)
    failed = 0
    for name, mode in MODES.items():
        ms.set_context(mode=mode)
        for function in CHECKS:
            try:
                function(name)
                print(f"ok {name} {function.__name__}", flush=True)
            except Exception as error:
                failed += 1
                print(
                    f"FAILED {name} {function.__name__}: {type(error).__name__} {str(error)[:400]}",
                    flush=True,
                )
                traceback.print_exc(file=sys.stdout)
    if CONTROL.misuse() != 0:
        failed += 1
        print("FAILED misuse", *CONTROL.misuse_log(), sep="\n")
    else:
        print("ok no misuse")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
