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
