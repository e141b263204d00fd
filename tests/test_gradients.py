"""The gradients of mal.add_lora and of the cells: the float64 formula, finite differences, bits, NaN, frozen inputs."""

from __future__ import annotations

import os
import subprocess
import sys

import mindspore as ms
import mindspore_addlora as mal
import ml_dtypes
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore_addlora import raw

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MS = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


@pytest.fixture(params=MODES)
def mode(request):
    ms.set_context(mode=MODES[request.param])
    return request.param


def problem(dtype="float32", b=13, h1=40, h2=24, h3=64, r=5, w=4, layers=2, with_a=True, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.standard_normal(shape) / 2).astype(DTYPES[dtype])

    indices = (np.arange(b) * 5 % (w + 2) - 1).astype(np.int32)
    indices[indices == 1] = 2  # slot 1 is used by no row
    return {
        "y": draw(b, h3),
        "x": draw(b, h1 if with_a else r),
        "weight_b": draw(w, layers, h2, r),
        "indices": indices,
        "weight_a": draw(w, layers, r, h1) if with_a else None,
        "g": draw(b, h3),
    }


SCALARS = {"layer_idx": 1, "scale": 0.75, "y_offset": 17}


def formula(p, layer_idx, scale, y_offset):
    """The gradients in float64, and for each the sum of the magnitudes of what is added up."""
    w, _, h2, _ = p["weight_b"].shape
    x, g = p["x"].astype(np.float64), p["g"].astype(np.float64)
    s = g[:, y_offset : y_offset + h2]
    b = p["weight_b"].astype(np.float64)
    a = None if p["weight_a"] is None else p["weight_a"].astype(np.float64)
    exact = {"y": g, "x": np.zeros_like(x), "weight_b": np.zeros_like(b)}
    size = {"y": np.abs(g), "x": np.zeros_like(x), "weight_b": np.zeros_like(b)}
    if a is not None:
        exact["weight_a"], size["weight_a"] = np.zeros_like(a), np.zeros_like(a)
    for row, index in enumerate(p["indices"]):
        if not 0 <= index < w:
            continue
        at = (index, layer_idx)
        z = x[row] if a is None else a[at] @ x[row]
        z_size = np.abs(x[row]) if a is None else np.abs(a[at]) @ np.abs(x[row])
        dz, dz_size = s[row] @ b[at], np.abs(s[row]) @ np.abs(b[at])
        exact["weight_b"][at] += scale * np.outer(s[row], z)
        size["weight_b"][at] += scale * np.outer(np.abs(s[row]), z_size)
        exact["x"][row] = scale * (dz if a is None else dz @ a[at])
        size["x"][row] = scale * (dz_size if a is None else dz_size @ np.abs(a[at]))
        if a is not None:
            exact["weight_a"][at] += scale * np.outer(dz, x[row])
            size["weight_a"][at] += scale * np.outer(dz_size, np.abs(x[row]))
    return exact, size


class Net(nn.Cell):
    def __init__(self, layer_idx, scale, y_offset):
        super().__init__()
        self.layer_idx, self.scale, self.y_offset = layer_idx, scale, y_offset

    def construct(self, y, x, weight_b, indices, weight_a, g):
        out = mal.add_lora(
            y, x, weight_b, indices, weight_a, self.layer_idx, self.scale, self.y_offset
        )
        return ops.sum(ops.cast(out * g, ms.float32))


class NetWithoutA(Net):
    def construct(self, y, x, weight_b, indices, g):
        out = mal.add_lora(y, x, weight_b, indices, None, self.layer_idx, self.scale, self.y_offset)
        return ops.sum(ops.cast(out * g, ms.float32))


def gradients(p, dtype="float32", scalars=SCALARS, **replaced):
    names = ["y", "x", "weight_b", "indices"] + ([] if p["weight_a"] is None else ["weight_a"])
    tensors = {
        name: Tensor(p[name]) if name == "indices" else Tensor(p[name], MS[dtype])
        for name in [*names, "g"]
    } | replaced
    net = (NetWithoutA if p["weight_a"] is None else Net)(**scalars)
    wanted = [number for number, name in enumerate(names) if name != "indices"]
    found = ms.grad(net, grad_position=tuple(wanted))(*tensors.values())
    result = {}
    for number, gradient in zip(wanted, found, strict=True):
        array = gradient.asnumpy()
        result[names[number]] = array.view(DTYPES[dtype]) if dtype == "bfloat16" else array
    return result


@pytest.mark.parametrize("with_a", [True, False], ids=["with_a", "without_a"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_the_formula_s(mode, dtype, with_a):
    for sizes in ({}, {"b": 70, "r": 16, "w": 2, "h1": 130, "h2": 33}, {"b": 1, "r": 1}):
        p = problem(dtype, with_a=with_a, **sizes)
        exact, size = formula(p, **SCALARS)
        found = gradients(p, dtype)
        assert set(found) == set(exact)
        for name, value in found.items():
            assert value.dtype == DTYPES[dtype]
            # One rounding to the dtype; float32 sums of up to 130 and 33 products, a few units of their magnitudes.
            allowed = UNIT[dtype] * np.abs(exact[name]) + 4 * 2.0**-24 * size[name] * 4
            allowed += {"float16": 2.0**-25}.get(dtype, 0)
            error = np.abs(value.astype(np.float64) - exact[name])
            assert (error <= allowed).all(), (name, (error / np.maximum(allowed, 1e-30)).max())
        unused = found["weight_b"][[1]]
        assert not unused.any() and not found["weight_b"][:, 0].any()


def test_finite_differences():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    p = problem(b=6, h1=8, h2=6, h3=8, r=3)
    scalars = {"layer_idx": 1, "scale": 0.75, "y_offset": 2}
    found = gradients(p, scalars=scalars)
    rng = np.random.default_rng(1)

    def loss(q):
        arguments = {n: v.astype(np.float32) if n != "indices" else v for n, v in q.items()}
        g = arguments.pop("g").astype(np.float64)
        return float((raw.add_lora(**arguments, **scalars, limits="none") * g).sum())

    for name in ("y", "x", "weight_a", "weight_b"):
        for _ in range(8):
            at = tuple(rng.integers(n) for n in p[name].shape)
            step = 0.25  # the loss is linear in each, so the step may be large
            up, down = dict(p), dict(p)
            up[name], down[name] = p[name].copy(), p[name].copy()
            up[name][at] += step
            down[name][at] -= step
            difference = (loss(up) - loss(down)) / (2 * step)
            assert abs(difference - found[name][at]) < 1e-4, (name, at)


def test_under_ms_jit():
    p = problem()
    net = Net(**SCALARS)
    names = ("y", "x", "weight_b", "indices", "weight_a", "g")
    tensors = [Tensor(p[name]) for name in names]

    @ms.jit
    def step(*arguments):
        return ms.grad(net, grad_position=(1, 2, 4))(*arguments)

    found = step(*tensors)
    exact, _ = formula(p, **SCALARS)
    for name, value in zip(("x", "weight_b", "weight_a"), found, strict=True):
        np.testing.assert_allclose(value.asnumpy(), exact[name], atol=1e-5)


def test_leading_dimensions_and_int64_indices(mode):
    p = problem(b=6)
    exact, _ = formula(p, **SCALARS)
    shaped = {n: Tensor(p[n].reshape(2, 3, -1)) for n in ("y", "x", "g")}
    found = gradients(p, indices=Tensor(p["indices"].astype(np.int64).reshape(2, 3)), **shaped)
    for name, value in found.items():
        np.testing.assert_allclose(value.reshape(exact[name].shape), exact[name], atol=1e-5)
    assert found["x"].shape == (2, 3, 40)


def test_a_dynamic_batch():
    ms.set_context(mode=ms.GRAPH_MODE)
    net = Net(**SCALARS)

    class Step(nn.Cell):
        def __init__(self):
            super().__init__()
            self.gradient = ops.GradOperation(get_all=True)

        def construct(self, y, x, weight_b, indices, weight_a, g):
            return self.gradient(net)(y, x, weight_b, indices, weight_a, g)

    step = Step()
    p = problem(b=12)
    bank = [Tensor(p["weight_b"]), Tensor(p["weight_a"])]
    rows = {n: Tensor(shape=[None, p[n].shape[1]], dtype=ms.float32) for n in ("y", "x", "g")}
    step.set_inputs(
        rows["y"], rows["x"], bank[0], Tensor(shape=[None], dtype=ms.int32), bank[1], rows["g"]
    )
    for n in (12, 3, 7):
        q = {name: v if name.startswith("weight") else v[:n] for name, v in p.items()}
        exact, _ = formula(q, **SCALARS)
        names = ("y", "x", "weight_b", "indices", "weight_a", "g")
        found = step(*(Tensor(q[name]) for name in names))
        for name, value in zip(names[:5], found[:5], strict=True):
            if name != "indices":
                np.testing.assert_allclose(value.asnumpy(), exact[name], atol=1e-5)


def test_an_empty_batch_has_zero_gradients():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    p = problem()
    q = {name: v if name.startswith("weight") else v[:0] for name, v in p.items()}
    for op, like in ((mal.ops._grad_weight_a, "weight_a"), (mal.ops._grad_weight_b, "weight_b")):
        tensors = [Tensor(q[n]) for n in ("g", "x", "weight_b", "indices", "weight_a")]
        found = op(*tensors, 1, 0.75, 17, 0).asnumpy()
        assert found.shape == p[like].shape
        assert not found.any()


def test_nan_in_what_no_row_uses_reaches_nothing(mode):
    p = problem()
    clean = gradients(p)
    for name in ("weight_a", "weight_b"):
        p[name][1] = np.nan  # the unused slot
        p[name][:, 0] = np.nan  # the other layer
    none = (p["indices"] < 0) | (p["indices"] >= 4)
    p["x"][none] = np.nan
    p["g"][none, :5] = np.nan  # a base row's gradient: y's alone
    found = gradients(p)
    for name in ("x", "weight_a", "weight_b"):
        assert found[name].tobytes() == clean[name].tobytes(), name
    assert not found["x"][none].any()
    assert np.isnan(found["y"][none, :5]).all()


DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import mindspore as ms
import test_gradients as t
from mindspore_addlora import raw
ms.set_context(mode=ms.PYNATIVE_MODE)
digest = hashlib.sha256()
for dtype in t.DTYPES:
    for sizes in ({}, {"b": 90, "r": 33, "h1": 300, "h2": 270, "h3": 300}):
        p = t.problem(dtype, **sizes)
        for threads in (1, 2, 5):
            raw.set_num_threads(threads)
            found = t.gradients(p, dtype)
            if threads == 1:
                first = found
            for name, value in found.items():
                assert value.tobytes() == first[name].tobytes(), (name, threads)
        for name in sorted(first):
            digest.update(first[name].tobytes())
print(digest.hexdigest(), raw.backends()["cpu"].detail.split()[-1])
"""


def test_the_same_bits_with_any_threads_and_kernel_set(tmp_path):
    digests = set()
    for name in raw.kernel_sets():
        done = subprocess.run(
            [sys.executable, "-c", DIGEST, os.path.dirname(__file__)],
            env=os.environ | {"ADDLORA_ISA": name},
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        digest, ran = done.stdout.split()
        assert ran == name
        digests.add(digest)
    assert len(digests) == 1


def test_a_row_s_place_does_not_change_its_gradient():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    p = problem(b=20)
    whole = gradients(p)["x"]
    order = np.random.default_rng(3).permutation(20)
    moved = {n: v if n.startswith("weight") else v[order] for n, v in p.items()}
    assert gradients(moved)["x"].tobytes() == whole[order].tobytes()


def train(cell, batches, mode, steps=5, rate=0.05):
    """Gradient descent on the sum of squares; y is zero."""
    optimizer = nn.SGD(cell.trainable_params(), learning_rate=rate)

    def loss(x, indices, target):
        out = cell(ops.zeros_like(target), x, indices)
        return ops.sum((out - target) ** 2)

    step = ms.value_and_grad(loss, None, optimizer.parameters)
    for _ in range(steps):
        for batch in batches:
            _, found = step(*batch)
            optimizer(found)


def test_adapters_trained_together_end_where_each_ends_alone(mode):
    rng = np.random.default_rng(9)
    first = [rng.standard_normal((4, 12)).astype(np.float32) / 4 for _ in range(3)]
    rows = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    x = rng.standard_normal((8, 12)).astype(np.float32)
    target = rng.standard_normal((8, 6)).astype(np.float32)

    def cell():
        made = mal.nn.AddLora(12, 6, 4, 3, dtype=ms.float32)
        for slot, a in enumerate(first):
            made.set_adapter(slot, a, np.zeros((6, 4), np.float32))
        return made

    together = cell()
    train(together, [[Tensor(x), Tensor(rows.astype(np.int32)), Tensor(target)]], mode)
    for slot in range(3):
        alone = cell()
        mine = rows == slot
        indices = Tensor(rows[mine].astype(np.int32))
        train(alone, [[Tensor(x[mine]), indices, Tensor(target[mine])]], mode)
        for name in ("lora_a", "lora_b"):
            one = getattr(alone, name).asnumpy()[slot]
            other = getattr(together, name).asnumpy()[slot]
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)
            untouched = [s for s in range(3) if s != slot]
            before = getattr(cell(), name).asnumpy()[untouched]
            assert getattr(alone, name).asnumpy()[untouched].tobytes() == before.tobytes()
        assert np.abs(together.lora_b.asnumpy()[slot]).max() > 1e-3
        assert np.abs(together.lora_a.asnumpy()[slot, 0] - first[slot]).max() > 1e-4


def test_frozen_inputs_cost_nothing_in_a_graph(tmp_path):
    """Only the gradients that are asked for are in the compiled graph."""
    ms.set_context(mode=ms.GRAPH_MODE)
    p = problem()

    class Frozen(nn.Cell):
        def __init__(self):
            super().__init__()
            self.b = Parameter(Tensor(p["weight_b"]), name="b")
            self.a = Parameter(Tensor(p["weight_a"]), name="a", requires_grad=False)

        def construct(self, y, x, indices):
            return ops.sum(mal.add_lora(y, x, self.b, indices, self.a, 1, 0.75, 17))

    net = Frozen()

    class Step(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = net
            self.gradient = ops.GradOperation(get_by_list=True)
            self.weights = ms.ParameterTuple(net.trainable_params())

        def construct(self, y, x, indices):
            return self.gradient(self.net, self.weights)(y, x, indices)

    step = Step()
    ms.set_context(save_graphs=2, save_graphs_path=str(tmp_path))
    try:
        found = step(*(Tensor(p[n]) for n in ("y", "x", "indices")))
    finally:
        ms.set_context(save_graphs=0)
    q = dict(p, g=np.ones_like(p["y"]))
    exact, _ = formula(q, **SCALARS)
    np.testing.assert_allclose(found[0].asnumpy(), exact["weight_b"], atol=1e-5)
    last = max(tmp_path.rglob("*validate*.ir"), key=lambda path: path.name)
    text = last.read_text()
    assert "AddLoraGradWeightB" in text
    assert "AddLoraGradWeightA" not in text
    assert "AddLoraGradX" not in text


COUNTED = {
    True: {"x": "_grad_x", "weight_b": "_grad_weight_b", "weight_a": "_grad_weight_a"},
    False: {"x": "_expand_grad_x", "weight_b": "_expand_grad_weight_b"},
}


def subsets(with_a):
    names = list(COUNTED[with_a])
    return [
        tuple(name for bit, name in enumerate(names) if number >> bit & 1)
        for number in range(1 << len(names))
    ]


@pytest.mark.parametrize(
    ("with_a", "wanted"),
    [(with_a, wanted) for with_a in COUNTED for wanted in subsets(with_a)],
    ids=lambda value: "+".join(value) or "y alone" if isinstance(value, tuple) else str(value),
)
def test_frozen_inputs_cost_nothing_in_pynative(monkeypatch, with_a, wanted):
    """Exactly the gradients that are needed are computed, and they are the formula's."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    p = problem(with_a=with_a)
    ran = []

    def counted(name, operator):
        def call(*arguments):
            ran.append(name)
            return operator(*arguments)

        return call

    for name, attribute in COUNTED[with_a].items():
        monkeypatch.setattr(mal.ops, attribute, counted(name, getattr(mal.ops, attribute)))
    parameters = {
        name: Parameter(Tensor(p[name]), name=name, requires_grad=name in wanted)
        for name in COUNTED[with_a]
    }

    def loss(y):
        x = parameters["x"] * 1  # not a leaf, as in a model
        a = parameters.get("weight_a")
        b = ops.reshape(parameters["weight_b"], p["weight_b"].shape)  # a view
        out = mal.add_lora(y, x, b, Tensor(p["indices"]), a, 1, 0.75, 17)
        return (out * Tensor(p["g"])).sum()

    weights = [parameters[name] for name in wanted]
    found = ms.grad(loss, 0, weights or None)(Tensor(p["y"]))
    exact, _ = formula(p, **SCALARS)
    dy, gradients = found if weights else (found, ())
    np.testing.assert_array_equal(dy.asnumpy(), p["g"])
    for name, gradient in zip(wanted, gradients, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), exact[name], atol=1e-5)
    assert sorted(ran) == sorted(wanted)


def test_a_gradient_of_a_gradient_is_refused(mode):
    """There is none, and it must not be taken for zero."""
    p = problem()
    others = [None if p[name] is None else Tensor(p[name]) for name in ("weight_b", "indices")]

    def loss(x):
        out = mal.add_lora(Tensor(p["y"]), x, *others, Tensor(p["weight_a"]), 1, 0.75, 17)
        return (out**2).sum()

    first = ms.grad(loss)

    def size(x):
        return (first(x) ** 2).sum()

    with pytest.raises(RuntimeError, match="Custom's bprop not defined"):
        ms.grad(size)(Tensor(p["x"])).asnumpy()
