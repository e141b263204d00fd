"""MultiLora.trainable and save_adapter: only the named adapters learn, and PEFT's format takes them back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = EXAMPLES / "data" / "tiny_llama"
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}

spec = importlib.util.spec_from_file_location("tiny_llama", EXAMPLES / "tiny_llama.py")
tiny_llama = sys.modules.get("tiny_llama") or importlib.util.module_from_spec(spec)
if "tiny_llama" not in sys.modules:
    sys.modules[spec.name] = tiny_llama  # MindSpore's compiler imports it by name
    spec.loader.exec_module(tiny_llama)

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(params=MODES)
def mode(request):
    ms.set_context(mode=MODES[request.param])
    return request.param


def attached(**options):
    model = tiny_llama.load_model(DATA)
    return model, mal.MultiLora(model, TARGETS, **({"max_rank": 32, "num_adapters": 5} | options))


def banks(lora) -> dict[str, bytes]:
    return {p.name: p.asnumpy().tobytes() for t in lora._targets for p in t.cell.bank()}


def steps(model, parameters, input_ids, count=3, optimizer=None):
    optimizer = optimizer or nn.AdamWeightDecay(parameters, learning_rate=1e-2, weight_decay=0.1)

    def loss(ids):
        logits = model(ids)[:, :-1]
        return ops.cross_entropy(ops.reshape(logits, (-1, 256)), ops.reshape(ids[:, 1:], (-1,)))

    step = ms.value_and_grad(loss, None, optimizer.parameters)
    losses = []
    for _ in range(count):
        value, found = step(input_ids)
        optimizer(found)
        losses.append(float(value.asnumpy()))
    return losses


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "expected.npz") as file:
        return dict(file)


def test_only_the_named_adapters_learn(mode, expected, tmp_path):
    model, lora = attached()
    for name in ("qv_r8", "mlp_r32", "all_r4_pattern"):
        lora.load_adapter(DATA / name, name)
    lora.create_adapter("new", rank=6, lora_alpha=12, seed=1)
    base = {
        p.name: p.asnumpy().tobytes()
        for p in model.get_parameters()
        if "lora" not in p.name and "route" not in p.name
    }
    frozen = banks(lora)
    input_ids = Tensor(expected["input_ids"])
    lora.route(["qv_r8", None, "new", "mlp_r32", "all_r4_pattern", "new"])
    before = model(input_ids).asnumpy()
    parameters = lora.trainable(["new", "all_r4_pattern"])
    assert np.abs(model(input_ids).asnumpy() - before).max() < 1e-5
    losses = steps(model, parameters, input_ids)
    assert losses[-1] < losses[0]
    assert banks(lora) == frozen, "the others' bits, whatever the optimizer does with weights"
    trained = model(input_ids).asnumpy()
    assert trained[[0, 1, 3]].tobytes() == before[[0, 1, 3]].tobytes()
    for row in (2, 4, 5):
        assert np.abs(trained[row] - before[row]).max() > 1e-3

    with pytest.raises(ValueError, match="not trainable"):
        lora.route([])
        lora.delete_adapter("new")
    lora.save_adapter(tmp_path / "new", "new")
    lora.save_adapter(tmp_path / "served", "qv_r8")
    names = ["qv_r8", None, "new", "mlp_r32", "all_r4_pattern", "new"]
    lora.route(names)
    assert lora.trainable([]) == []
    served = model(input_ids).asnumpy()
    np.testing.assert_allclose(served, trained, atol=1e-5)
    after = {
        p.name: p.asnumpy().tobytes()
        for p in model.get_parameters()
        if "lora" not in p.name and "route" not in p.name
    }
    assert after == base
    changed = {
        (name, slot)
        for name, before_bytes in frozen.items()
        for slot in range(5)
        if np.frombuffer(before_bytes).reshape(5, -1)[slot].tobytes()
        != np.frombuffer(banks(lora)[name]).reshape(5, -1)[slot].tobytes()
    }
    assert {slot for _, slot in changed} == {2, 3}, "the slots of the two that learnt"

    # Another MultiLora reads what was saved by PEFT's own rules, and computes the same.
    again, reader = attached()
    for name in ("new", "served"):
        reader.load_adapter(tmp_path / name, name)
    reader.route(["served", None, "new", None, None, "new"])
    read = again(input_ids).asnumpy()
    np.testing.assert_allclose(read[[0, 2, 5]], served[[0, 2, 5]], atol=2e-5)
    assert reader.adapters["new"].rank == 6
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (6, 12)
    weights = mal.peft.read_adapter(tmp_path / "served").modules
    original = mal.peft.read_adapter(DATA / "qv_r8").modules
    assert weights.keys() == original.keys()
    for name, one in original.items():
        assert weights[name].rank == one.rank
        assert weights[name].scaling == one.scaling
        assert weights[name].a.tobytes() == one.a.tobytes()
        np.testing.assert_allclose(weights[name].b, one.b, rtol=2e-7)


def test_training_is_right_through_the_whole_model(expected):
    """The gradient of a bank equals finite differences of the loss."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    model, lora = attached()
    lora.load_adapter(DATA / "all_r4_pattern", "a")
    lora.route(["a", None, "a"])
    parameters = lora.trainable(["a"])
    ids = Tensor(expected["input_ids"][:3])

    def loss():
        logits = model(ids)[:, :-1]
        return ops.cross_entropy(ops.reshape(logits, (-1, 256)), ops.reshape(ids[:, 1:], (-1,)))

    value, found = ms.value_and_grad(loss, None, parameters)()
    rng = np.random.default_rng(0)
    checked = 0
    for parameter, gradient in zip(parameters, found, strict=True):
        gradient = gradient.asnumpy().astype(np.float64)
        if np.abs(gradient).max() < 1e-4 or checked >= 12:
            continue
        direction = np.sign(gradient) * (np.abs(gradient) > np.abs(gradient).max() / 4)
        step = 0.02 / np.sqrt(np.abs(direction).sum()) * rng.uniform(0.5, 1)
        kept = parameter.asnumpy().copy()
        values = []
        for sign in (1, -1):
            parameter.set_data(Tensor((kept + sign * step * direction).astype(np.float32)))
            values.append(float(loss().asnumpy()))
        parameter.set_data(Tensor(kept))
        slope = (values[0] - values[1]) / (2 * step)
        assert abs(slope - (gradient * direction).sum()) < 2e-2 * abs(slope) + 1e-4, parameter.name
        checked += 1
    assert checked == 12


def test_what_cannot_be_trained(expected):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    _, lora = attached()
    lora.load_adapter(DATA / "qv_r8", "a")
    for names, error, words in [
        ("a", TypeError, "a list of names"),
        (["b"], ValueError, "got 'b'"),
        (["a", "a"], ValueError, "each once"),
    ]:
        with pytest.raises(error, match=words):
            lora.trainable(names)
    for arguments, error, words in [
        (("a", 4, 8), ValueError, "not loaded"),
        (("b", 33, 8), ValueError, "1 <= rank <= 32"),
        (("b", 4.0, 8), TypeError, "rank: expected an integer"),
        (("b", 4, float("nan")), ValueError, "lora_alpha"),
    ]:
        with pytest.raises(error, match=words):
            lora.create_adapter(*arguments)
    with pytest.raises(ValueError, match="got 'b'"):
        lora.save_adapter("x", "b")
    assert list(lora.adapters) == ["a"]

    fused = tiny_llama.load_model(DATA, fused=True)
    packed = mal.MultiLora(
        fused, ["qkv_proj"], 32, 2, packed_modules={"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    )
    packed.load_adapter(DATA / "qv_r8", "a")
    for call in (lambda: packed.trainable(["a"]), lambda: packed.save_adapter("x", "a")):
        with pytest.raises(ValueError, match="expected the rows of its parts"):
            call()


def test_fused_projections_with_their_rows_are_trained(mode, expected, tmp_path):
    model = tiny_llama.load_model(DATA, fused=True)
    attention = model.model.layers[0].self_attn
    sizes = {"q_proj": attention.q_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size}
    lora = mal.MultiLora(model, ["qkv_proj"], 16, 2, packed_modules={"qkv_proj": sizes})
    lora.create_adapter("a", 4, 8, seed=0)
    lora.route(["a", "a", None])
    ids = Tensor(expected["input_ids"][:3])
    losses = steps(model, lora.trainable(["a"]), ids, 4)
    assert losses[-1] < losses[0]
    trained = model(ids).asnumpy()
    lora.save_adapter(tmp_path / "a", "a")
    separate, reader = attached()
    reader.load_adapter(tmp_path / "a", "a")
    reader.route(["a", "a", None])
    np.testing.assert_allclose(separate(ids).asnumpy(), trained, atol=1e-4)
    lora.detach()


def test_the_example(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "train_three_adapters.py"),
            "--steps",
            "30",
            "--output",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read back and served" in done.stdout
    assert (tmp_path / "out" / "training.png").stat().st_size > 1000
    assert len(mal.peft.read_adapter(tmp_path / "out" / "code").modules) == 14
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
