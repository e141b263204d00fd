"""MultiLora on whole models: right, exact where it must be, nothing compiled twice, nothing changed by a refusal."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import threading
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = EXAMPLES / "data" / "tiny_llama"
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]

spec = importlib.util.spec_from_file_location("tiny_llama", EXAMPLES / "tiny_llama.py")
tiny_llama = sys.modules.get("tiny_llama") or importlib.util.module_from_spec(spec)
if "tiny_llama" not in sys.modules:
    sys.modules[spec.name] = tiny_llama  # MindSpore's compiler imports it by name
    spec.loader.exec_module(tiny_llama)

SIZES = {
    "qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32},
    "gate_up_proj": {"gate_proj": 160, "up_proj": 160},
}


@pytest.fixture(params=MODES)
def mode(request):
    ms.set_context(mode=MODES[request.param])
    return request.param


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "expected.npz") as file:
        return dict(file)


def names_of(expected) -> list[str | None]:
    return [None if name == tiny_llama.BASE else str(name) for name in expected["adapter_names"]]


def attach(model, fused=False, **options):
    packed = {"packed_modules": tiny_llama.PACKED} if fused else {}
    options = {"max_rank": 32, "num_adapters": 4} | packed | options
    return mal.MultiLora(model, FUSED if fused else SEPARATE, **options)


def sized(model) -> dict[str, dict[str, int]]:
    """The rows of the parts of the fused projections."""
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    return {
        "qkv_proj": {
            "q_proj": attention.q_size,
            "k_proj": attention.kv_size,
            "v_proj": attention.kv_size,
        },
        "gate_up_proj": {"gate_proj": mlp.size, "up_proj": mlp.size},
    }


def everything(lora) -> list[bytes]:
    """The bytes of the banks, and the route."""
    parameters = [p for target in lora._targets for p in target.cell.bank()]
    parameters += [lora._route.rows, lora._route.tokens]
    return [p.asnumpy().tobytes() for p in parameters]


@pytest.mark.parametrize("form", ["separate", "fused", "fused_with_sizes"])
def test_a_mixed_batch_is_peft_s(mode, expected, form):
    fused = form != "separate"
    model = tiny_llama.load_model(DATA, fused=fused)
    input_ids = Tensor(expected["input_ids"])
    base = model(input_ids).asnumpy()
    names = [parameter.name for parameter in model.get_parameters()]
    options = {"packed_modules": sized(model)} if form == "fused_with_sizes" else {}
    lora = attach(model, fused, **options)
    assert [
        p.name for p in model.get_parameters() if "lora" not in p.name and "route" not in p.name
    ] == names
    assert model(input_ids).asnumpy().tobytes() == base.tobytes()
    for name in tiny_llama.ADAPTERS:
        lora.load_adapter(DATA / name, name)
    assert model(input_ids).asnumpy().tobytes() == base.tobytes(), "loaded, but not routed"
    lora.route(names_of(expected))
    logits = model(input_ids).asnumpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-4)
    for row, name in enumerate(names_of(expected)):
        if name is None:
            assert logits[row].tobytes() == base[row].tobytes()
        else:
            assert np.abs(logits[row] - base[row]).max() > 0.1
    lora.route([None])
    assert model(input_ids).asnumpy().tobytes() == base.tobytes()
    assert lora.detach() is model
    assert model(input_ids).asnumpy().tobytes() == base.tobytes()
    assert [parameter.name for parameter in model.get_parameters()] == names


def test_the_order_of_rows_and_of_loading_does_not_matter(mode, expected):
    model = tiny_llama.load_model(DATA)
    lora = attach(model, num_adapters=9)
    for name in reversed(tiny_llama.ADAPTERS):
        lora.load_adapter(DATA / name, name)
    order = np.array([5, 3, 1, 0, 4, 2])
    names = names_of(expected)
    lora.route([names[row] for row in order])
    logits = model(Tensor(expected["input_ids"][order])).asnumpy()
    np.testing.assert_allclose(logits, expected["logits"][order], rtol=0, atol=2e-4)


def test_nothing_compiles_when_adapters_come_and_go(expected):
    ms.set_context(mode=ms.GRAPH_MODE)
    model = tiny_llama.load_model(DATA)
    lora = attach(model, num_adapters=2)
    input_ids = Tensor(expected["input_ids"])
    names = names_of(expected)
    model(input_ids)
    compiled = set(model.compile_cache)
    assert len(compiled) == 1
    for name in tiny_llama.ADAPTERS:
        lora.load_adapter(DATA / name, "the one")
        lora.route(["the one"] * 6)
        logits = model(input_ids).asnumpy()
        for row, its in enumerate(names):
            if its == name:
                np.testing.assert_allclose(logits[row], expected["logits"][row], rtol=0, atol=2e-4)
        lora.route([])
        lora.delete_adapter("the one")
    assert set(model.compile_cache) == compiled


def test_a_model_compiled_before_it_is_attached_and_attached_again(expected):
    ms.set_context(mode=ms.GRAPH_MODE)
    model = tiny_llama.load_model(DATA)
    input_ids = Tensor(expected["input_ids"])
    base = model(input_ids).asnumpy()
    for _ in range(2):
        lora = attach(model)
        lora.load_adapter(DATA / "mlp_r32", "mlp")
        lora.route(["mlp"] * 6)
        assert np.abs(model(input_ids).asnumpy() - base).max() > 0.1
        lora.detach()
        assert model(input_ids).asnumpy().tobytes() == base.tobytes()
    with pytest.raises(ValueError, match="detached"):
        lora.route([])
    assert repr(lora) == "MultiLora(detached)"


# ---- what is refused ----------------------------------------------------------------------------------------------


def edited(tmp_path, source="mlp_r32", **config):
    """A copy of an adapter with another configuration."""
    folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
    shutil.copytree(DATA / source, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.fixture
def loaded(expected):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    lora = attach(tiny_llama.load_model(DATA), num_adapters=2, max_rank=32)
    lora.load_adapter(DATA / "qv_r8", "first")
    lora.route(["first", None])
    return lora


def refused(lora, call, error, words):
    before = everything(lora), dict(lora.adapters), repr(lora)
    with pytest.raises(error, match=words):
        call()
    assert (everything(lora), dict(lora.adapters), repr(lora)) == before


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"peft_type": "IA3"}, "peft_type"),
        (
            {"target_modules": ["gate_proj", "up_proj", "down_proj", "o_proj"]},
            "no tensors|got none for",
        ),
    ],
)
def test_a_folder_that_cannot_be_honoured(loaded, tmp_path, config, words):
    folder = edited(tmp_path, **config)
    refused(loaded, lambda: loaded.load_adapter(folder, "second"), ValueError, words)


def test_other_refusals_of_a_load(loaded, tmp_path):
    def load(path, name="second"):
        return lambda: loaded.load_adapter(path, name)

    refused(loaded, load(tmp_path / "nothing"), OSError, "nothing")
    refused(loaded, load(DATA / "mlp_r32", "first"), ValueError, "already|not loaded")
    refused(loaded, load(DATA / "mlp_r32", 3), TypeError, "adapter_name: expected a string")
    broken = edited(tmp_path)
    (broken / "adapter_config.json").write_text("{")
    refused(loaded, load(broken), ValueError, "adapter_config.json")
    cut = edited(tmp_path)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    refused(loaded, load(cut), ValueError, "adapter_model.safetensors")
    loaded.load_adapter(DATA / "attn_r16_rslora", "second")
    refused(
        loaded,
        load(DATA / "mlp_r32", "third"),
        ValueError,
        "free slot, got 2 of 2 taken by first, second",
    )


def write(folder, modules, **options):
    mal.peft.write_adapter(folder, modules, **options)
    return folder


def weights(rank=4, h1=64, h2=64, value=0.1, dtype=np.float32):
    return mal.peft.LoraWeights(
        np.full((rank, h1), value, dtype), np.full((h2, rank), value, dtype), 1.0, rank
    )


def test_modules_and_shapes_that_do_not_fit(loaded, tmp_path):
    layer = "model.layers.0.self_attn."
    for number, (modules, words) in enumerate(
        [
            ({f"{layer}q_proj": weights(h1=63)}, r"q_proj: a: expected \[r, 64\]"),
            ({f"{layer}q_proj": weights(h2=65)}, r"q_proj: b: expected \[64, 4\]"),
            ({f"{layer}z_proj": weights()}, "z_proj, where it has no dense cell"),
            ({"lm_head": weights(h2=256)}, "lm_head, to which nothing is attached"),
            ({f"{layer}q_proj": weights(rank=33)}, "33"),
            ({f"{layer}q_proj": weights(), f"{layer}o_proj": weights(h2=7)}, "o_proj: b"),
        ]
    ):
        folder = write(tmp_path / str(number), modules)
        refused(loaded, lambda folder=folder: loaded.load_adapter(folder, "x"), ValueError, words)


def test_an_adapter_of_a_fused_cell_as_a_whole_where_its_parts_are_served(tmp_path):
    lora = mal.MultiLora(Small(), ["q_proj"], 4, 2, packed_modules={"q_proj": ["q", "k"]})
    folder = write(tmp_path / "whole", {"q_proj": weights(2, 8, 4)})
    refused(
        lora,
        lambda: lora.load_adapter(folder, "whole"),
        ValueError,
        "got q_proj, which packed_modules takes for q, k",
    )


def test_routes_and_deletions_that_are_refused(loaded):
    refused(
        loaded,
        lambda: loaded.route(["first", "legal"]),
        ValueError,
        "row 1: .*'first'.* got 'legal'",
    )
    refused(loaded, lambda: loaded.route("first"), TypeError, "a list of names")
    refused(loaded, lambda: loaded.route([1]), TypeError, "row 0, got int")
    refused(loaded, lambda: loaded.route(["first"], 0), ValueError, "tokens_per_row")
    refused(loaded, lambda: loaded.route(["first"] * 3, 65536), ValueError, "max_rows = 65536")
    refused(loaded, lambda: loaded.delete_adapter("first"), ValueError, "route first")
    refused(loaded, lambda: loaded.delete_adapter("legal"), ValueError, "got 'legal'")
    loaded.route([None])
    loaded.delete_adapter("first")
    assert not loaded.adapters
    for target in loaded._targets:
        for parameter in target.cell.bank():
            assert not parameter.asnumpy().any()


class Small(nn.Cell):
    def __init__(self, **options):
        super().__init__()
        self.q_proj = nn.Dense(8, 4, **options)
        self.mlp = nn.SequentialCell(nn.Dense(4, 8, activation="relu", **options), nn.ReLU())
        self.out = mint.nn.Linear(8, 4) if not options else nn.Dense(8, 4, **options)

    def construct(self, x):
        return self.out(self.mlp(self.q_proj(x)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["q_proj", "k_proj"]}, "target_modules: .*'k_proj'"),
        ({"target_modules": r".*attn.*"}, "matches none of 3"),
        ({"max_rank": 0}, "max_rank"),
        ({"num_adapters": -1}, "num_adapters"),
        ({"max_rows": 0}, "max_rows"),
        ({"packed_modules": {"qkv": ["q"]}}, "packed_modules: .*qkv"),
        ({"packed_modules": {"q_proj": {"q": 3, "k": 2}}}, "packed_modules: expected the 4 rows"),
        ({"packed_modules": {"q_proj": {"q": 5, "k": -1}}}, "q_proj: .* of 'k', got -1"),
        (
            {"packed_modules": {"q_proj": {"q": 4, "k": None}}},
            "q_proj: expected the rows of all parts or none",
        ),
        ({"packed_modules": {"q_proj": ["q", "q"]}}, "q_proj: expected each part once"),
        ({"packed_modules": {"q_proj": []}}, "q_proj: expected at least one part"),
        ({"packed_modules": {"q_proj": ["out", "k"]}}, "'out' for q_proj and out"),
        ({"target_modules": "("}, r"target_modules: .\(. is not a regular expression"),
        ({"rename": {"(": "x"}}, r"rename: .*'\('"),
        ({"rename": lambda path: "one"}, "rename: .*'one' for q_proj and mlp.0"),
        ({"rename": lambda path: ""}, "rename: .*of q_proj, got ''"),
    ],
)
def test_what_cannot_be_attached(options, words):
    model = Small()
    cells = dict(model.cells_and_names())
    with pytest.raises(ValueError, match=words):
        mal.MultiLora(
            model, **({"target_modules": ["q_proj"], "max_rank": 4, "num_adapters": 2} | options)
        )
    assert dict(model.cells_and_names()) == cells
    assert model.mlp[0].activation_flag
    lora = mal.MultiLora(model, ["q_proj"], 4, 2)
    with pytest.raises(ValueError, match="detach first"):
        mal.MultiLora(model, ["q_proj"], 4, 2)
    lora.detach()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packed_modules": {"q_proj": "qk"}}, "packed_modules: q_proj: .* got str"),
        ({"packed_modules": {"q_proj": [1, 2]}}, "q_proj: .* got int"),
        ({"packed_modules": {"q_proj": {"q": 2.0, "k": 2}}}, "q_proj: .* of 'q', got float"),
        ({"packed_modules": ["q_proj"]}, "packed_modules: expected a mapping, got list"),
        ({"target_modules": 5}, "target_modules: .* got int"),
        ({"target_modules": ["q_proj", 5]}, "target_modules: .* got int"),
        ({"rename": 5}, "rename: .* got int"),
        ({"rename": lambda path: None}, "rename: .*of q_proj, got None"),
        ({"dtype": ms.int32}, "dtype: expected float16, bfloat16 or float32, got Int32"),
    ],
)
def test_arguments_of_another_type(options, words):
    model = Small()
    cells = dict(model.cells_and_names())
    options = {"target_modules": r".*", "max_rank": 4, "num_adapters": 2} | options
    with pytest.raises(TypeError, match=words):
        mal.MultiLora(model, **options)
    assert dict(model.cells_and_names()) == cells
    assert model.mlp[0].activation_flag


# ---- models of many kinds -----------------------------------------------------------------------------------------


def delta(x, one):
    return one.scaling * (x @ one.a.T) @ one.b.T


def test_sequential_cells_activations_and_linear(mode, tmp_path):
    ms.set_seed(3)
    model = Small()
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    base = model(Tensor(x)).asnumpy()
    modules = {"q_proj": weights(2, 8, 4), "mlp.0": weights(3, 4, 8, 0.3), "out": weights(1, 8, 4)}
    lora = mal.MultiLora(model, r"q_proj|mlp\.0|out", 4, 3)
    lora.load_adapter(write(tmp_path / "a", modules), "a")
    lora.route(["a", None, "a"])
    out = model(Tensor(x)).asnumpy()
    q = model.q_proj.base(Tensor(x)).asnumpy()
    q[::2] += delta(x, modules["q_proj"])[::2]
    h = model.mlp[0].base(Tensor(q)).asnumpy()
    h[::2] += delta(q, modules["mlp.0"])[::2]
    h = np.maximum(h, 0)
    y = model.out.base(Tensor(h)).asnumpy()
    y[::2] += delta(h, modules["out"])[::2]
    np.testing.assert_allclose(out, y, atol=1e-5)
    assert out[1].tobytes() == base[1].tobytes()
    lora.detach()
    assert model(Tensor(x)).asnumpy().tobytes() == base.tobytes()


class Flattened(nn.Cell):
    """Flattens [B, S, H] before one of its dense cells, as many models do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(8, 8)
        self.second = nn.Dense(8, 8)

    def construct(self, x):
        x = self.first(x)
        return ops.reshape(self.second(ops.reshape(x, (-1, 8))), x.shape)


def test_models_that_flatten_their_batch(mode, tmp_path):
    model = Flattened()
    x = Tensor(np.random.default_rng(1).standard_normal((3, 5, 8)).astype(np.float32))
    base = model(x).asnumpy()
    lora = mal.MultiLora(model, ["first", "second"], 4, 2)
    modules = {"first": weights(2, 8, 8), "second": weights(4, 8, 8)}
    lora.load_adapter(write(tmp_path / "a", modules), "a")
    lora.route(["a", "a", "a"], tokens_per_row=5)
    whole = model(x).asnumpy()
    lora.route(["a", None, "a"], tokens_per_row=5)
    out = model(x).asnumpy()
    assert out[1].tobytes() == base[1].tobytes()
    assert out[::2].tobytes() == whole[::2].tobytes()
    assert np.abs(out[::2] - base[::2]).max() > 0.1
    lora.route(["a"], tokens_per_row=5)
    out = model(x).asnumpy()
    assert out[0].tobytes() == whole[0].tobytes()
    assert out[1:].tobytes() == base[1:].tobytes(), "rows past the end of the route run the base"


def test_more_rows_than_can_be_routed(mode, tmp_path):
    model = Small()
    lora = mal.MultiLora(model, ["q_proj"], 4, 2, max_rows=2)
    lora.load_adapter(write(tmp_path / "a", {"q_proj": weights(2, 8, 4)}), "a")
    x = Tensor(np.ones((5, 8), np.float32))
    base = model(x).asnumpy()
    lora.route(["a", "a"])
    out = model(x).asnumpy()
    assert out[2:].tobytes() == base[2:].tobytes()
    assert np.abs(out[:2] - base[:2]).max() > 0


def test_a_dynamic_batch(tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)
    model = Small()
    lora = mal.MultiLora(model, ["q_proj"], 4, 2, max_rows=6)
    lora.load_adapter(write(tmp_path / "a", {"q_proj": weights(2, 8, 4)}), "a")
    lora.route(["a", None, "a", "a"])
    x = np.random.default_rng(2).standard_normal((9, 8)).astype(np.float32)
    fixed = {n: model(Tensor(x[:n])).asnumpy() for n in (2, 5, 9)}
    model.set_inputs(Tensor(shape=[None, 8], dtype=ms.float32))
    model.compile_cache.clear()
    for n, expected in fixed.items():
        np.testing.assert_allclose(model(Tensor(x[:n])).asnumpy(), expected, atol=1e-6)


class Tied(nn.Cell):
    """One dense cell, with an activation, in two places."""

    def __init__(self):
        super().__init__()
        self.first_proj = nn.Dense(8, 8, activation="relu")
        self.block = nn.SequentialCell(self.first_proj)

    def construct(self, x):
        return self.block(self.first_proj(x))


@pytest.mark.parametrize("adapted", ["first_proj", "block.0"])
@pytest.mark.parametrize("targets", [["first_proj"], r".*"])
def test_one_cell_in_two_places_has_an_adapter_in_each(mode, tmp_path, adapted, targets):
    """PEFT goes through the modules without repeats: it adapts a shared one where it comes first, and there only."""
    model = Tied()
    weight, bias = model.first_proj.weight, model.first_proj.bias
    x = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
    base = model(Tensor(x)).asnumpy()
    parameters = [parameter.name for parameter in model.get_parameters()]
    lora = mal.MultiLora(model, targets, 4, 2)
    one = weights(2, 8, 8)
    lora.load_adapter(write(tmp_path / "a", {adapted: one}, target_modules=r".*"), "a")
    lora.route(["a", None, "a"])
    out = model(Tensor(x)).asnumpy()

    def dense(x, has_adapter):
        product = x @ weight.asnumpy().T + bias.asnumpy()
        return np.maximum(product + delta(x, one) if has_adapter else product, 0)

    expected = dense(dense(x, adapted == "first_proj"), adapted == "block.0")
    np.testing.assert_allclose(out[::2], expected[::2], rtol=1e-5, atol=1e-5)
    assert np.abs(out[::2] - base[::2]).max() > 1e-2
    assert out[1].tobytes() == base[1].tobytes()
    lora.detach()
    assert model.first_proj is model.block[0]
    assert model(Tensor(x)).asnumpy().tobytes() == base.tobytes()
    assert [parameter.name for parameter in model.get_parameters()] == parameters


class Inner(nn.Cell):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Dense(8, 8)

    def construct(self, x):
        return self.q_proj(x)


class Outer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def construct(self, x):
        return self.inner(x) * 2


def test_a_block_that_is_used_twice(mode, tmp_path):
    model = nn.SequentialCell(Inner())
    model.append(model[0])
    x = Tensor(np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32))
    base = model(x).asnumpy()
    lora = mal.MultiLora(model, ["q_proj"], 4, 2)
    one = weights(2, 8, 8)
    lora.load_adapter(write(tmp_path / "a", {"0.q_proj": one}, target_modules=["q_proj"]), "a")
    lora.route(["a", None, "a"])
    out = model(x).asnumpy()
    dense = model[0].q_proj
    h = x.asnumpy()
    for _ in range(2):
        h = h @ dense.weight.asnumpy().T + dense.bias.asnumpy() + delta(h, one)
    np.testing.assert_allclose(out[::2], h[::2], rtol=1e-4, atol=1e-4)
    assert out[1].tobytes() == base[1].tobytes()


class Pair(nn.Cell):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def construct(self, x):
        return self.first(x), self.second(x)


def test_two_models_in_one(mode, tmp_path):
    folder = write(tmp_path / "a", {"q_proj": weights(2, 8, 8)})
    models = [Inner(), Inner()]
    x = Tensor(np.ones((2, 8), np.float32))
    base = [model(x).asnumpy() for model in models]
    loras = [mal.MultiLora(model, ["q_proj"], 4, 2) for model in models]
    pair = Pair(*models)
    for lora, names in zip(loras, (["a", None], [None, "a"]), strict=True):
        lora.load_adapter(folder, "a")
        lora.route(names)
    for row, (out, alone) in enumerate(zip(pair(x), base, strict=True)):
        assert np.abs(out.asnumpy()[row] - alone[row]).max() > 0.01
        assert out.asnumpy()[1 - row].tobytes() == alone[1 - row].tobytes()


def test_two_on_one_model(mode, tmp_path):
    model = Small()
    x = Tensor(np.random.default_rng(5).standard_normal((3, 8)).astype(np.float32))
    base = model(x).asnumpy()
    first, second = (mal.MultiLora(model, [name], 4, 2) for name in ("q_proj", "out"))
    first.load_adapter(write(tmp_path / "a", {"q_proj": weights(2, 8, 4)}), "a")
    second.load_adapter(write(tmp_path / "b", {"out": weights(2, 8, 4)}), "b")

    def moved():
        return [bool(np.abs(row).max() > 1e-4) for row in model(x).asnumpy() - base]

    first.route(["a"])
    second.route([None, "b"])
    assert moved() == [True, True, False]
    first.detach()
    assert moved() == [False, True, False]
    second.detach()
    assert model(x).asnumpy().tobytes() == base.tobytes()


def test_cells_that_hold_each_other():
    model = Outer()
    model.inner.insert_child_to_cell("owner", model)
    lora = mal.MultiLora(model, ["q_proj"], 4, 2)
    assert [target.path for target in lora._targets] == ["inner.q_proj"]


def test_a_part_of_the_model_that_was_called_by_itself(tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)
    model = Outer()
    x = Tensor(np.ones((2, 8), np.float32))
    whole, part = model(x).asnumpy(), model.inner(x).asnumpy()
    lora = mal.MultiLora(model, ["q_proj"], 4, 2)
    lora.load_adapter(write(tmp_path / "a", {"inner.q_proj": weights(2, 8, 8)}), "a")
    lora.route(["a"])
    assert np.abs(model(x).asnumpy() - whole)[0].max() > 0.01
    assert np.abs(model.inner(x).asnumpy() - part)[0].max() > 0.01
    lora.detach()
    assert model.inner(x).asnumpy().tobytes() == part.tobytes()


def test_other_names_and_float16(mode, tmp_path):
    model = Small(dtype=ms.float16)
    lora = mal.MultiLora(model, ["q_proj"], 4, 2, rename={"^q_proj$": "transformer.query"})
    assert {str(p.dtype) for t in lora._targets for p in t.cell.bank()} == {"Float16"}
    lora.load_adapter(write(tmp_path / "a", {"transformer.query": weights(2, 8, 4)}), "a")
    lora.route(["a", None])
    x = Tensor(np.ones((2, 8), np.float16))
    out = model(x).asnumpy()
    assert out.dtype == np.float16
    assert np.abs(out[0].astype(float) - out[1]).max() > 0
    by_function = mal.MultiLora(
        Small(), ["q_proj"], 4, 2, rename=lambda path: f"transformer.{path}"
    )
    by_function.load_adapter(write(tmp_path / "b", {"transformer.q_proj": weights(2, 8, 4)}), "b")
    too_large = weights(2, 8, 4, 1e5)
    folder = write(tmp_path / "c", {"transformer.query": too_large})
    refused(
        lora, lambda: lora.load_adapter(folder, "c"), ValueError, "transformer.query: a: .*float16"
    )


class Chain(nn.Cell):
    def __init__(self, dtype):
        super().__init__()
        self.q_proj = nn.Dense(8, 8, dtype=dtype)
        self.k_proj = nn.Dense(8, 8, dtype=dtype)

    def construct(self, x):
        return self.k_proj(self.q_proj(x))


@pytest.mark.parametrize("bank", [None, ms.float16, ms.float32], ids=["none", "half", "single"])
@pytest.mark.parametrize("kind", ["float32", "float16", "to_float"])
def test_base_rows_in_models_of_every_dtype(mode, tmp_path, kind, bank):
    """Equal bits to the model alone; but MindSpore's graphs on the CPU keep float32 between operators in float16, so there
    to the attached model with nothing routed."""
    model = Chain(ms.float16 if kind == "float16" else ms.float32)
    if kind == "to_float":
        model.to_float(ms.float16)
    data = np.random.default_rng(7).standard_normal((5, 8)).astype(np.float32)
    x = Tensor(data, ms.float16 if kind == "float16" else ms.float32)
    alone = model(x).asnumpy()
    lora = mal.MultiLora(model, ["q_proj"], 4, 2, dtype=bank)
    attached = model(x).asnumpy()
    assert attached.dtype == alone.dtype
    if kind == "float32" or mode == "pynative":
        assert attached.tobytes() == alone.tobytes()
    else:
        np.testing.assert_allclose(attached, alone, rtol=0, atol=2**-8)
    lora.load_adapter(write(tmp_path / "a", {"q_proj": weights(2, 8, 8, 0.5)}), "a")
    lora.route(["a", None, "a"])
    out = model(x).asnumpy()
    assert out[[1, 3, 4]].tobytes() == attached[[1, 3, 4]].tobytes()
    assert (np.abs(out[[0, 2]].astype(np.float32) - attached[[0, 2]]).max(axis=1) > 0.01).all()


def test_parts_of_a_fused_cell_that_nobody_can_place(tmp_path):
    class Fused(nn.Cell):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Dense(8, 16)

    model = Fused()
    lora = mal.MultiLora(model, ["qkv"], 4, 3, packed_modules={"qkv": ["q", "k", "v"]})
    only_k = write(tmp_path / "k", {"k": weights(2, 8, 4)})
    refused(
        lora,
        lambda: lora.load_adapter(only_k, "k"),
        ValueError,
        "without the rows of q, v; give them",
    )
    lora.load_adapter(write(tmp_path / "q", {"q": weights(2, 8, 8)}), "q")  # k and v share 8 rows
    lora.load_adapter(only_k, "k")  # which leaves 4 for v
    wrong = write(tmp_path / "w", {"q": weights(2, 8, 6)})
    refused(
        lora,
        lambda: lora.load_adapter(wrong, "w"),
        ValueError,
        "expected 8 rows, as an earlier adapter has",
    )


def test_the_banks_are_frozen_and_described(expected):
    model = tiny_llama.load_model(DATA)
    trainable = {p.name for p in model.trainable_params()}
    lora = attach(model)
    assert {p.name for p in model.trainable_params()} == trainable
    lora.load_adapter(DATA / "mlp_r32", "mlp")
    info = lora.adapters["mlp"]
    assert (info.slot, info.rank) == (0, 32)
    assert info.modules["model.layers.0.mlp.up_proj"][0] == 32
    assert info.path == str(DATA / "mlp_r32")
    with pytest.raises(TypeError):
        lora.adapters["x"] = info
    size = sum(p.nbytes for t in lora._targets for p in t.cell.bank())
    assert f"3 of 4 slots free, banks {size:,} bytes of Float32, 0 rows routed" in repr(lora)
    assert "mlp: slot 0, rank 32" in repr(lora)


# ---- checkpoints and threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_saved_and_restored(mode, expected, tmp_path, fused):
    model = tiny_llama.load_model(DATA, fused=fused)
    lora = attach(model, fused)
    for name in tiny_llama.ADAPTERS[1:]:
        lora.load_adapter(DATA / name, name)
    lora.save(tmp_path / "saved")

    again = tiny_llama.load_model(DATA, fused=fused)
    restored = attach(again, fused)
    restored.restore(tmp_path / "saved")
    assert dict(restored.adapters) == dict(lora.adapters)
    restored.load_adapter(DATA / "qv_r8", "qv_r8")
    restored.route(names_of(expected))
    logits = again(Tensor(expected["input_ids"])).asnumpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-4)

    refused(
        restored,
        lambda: restored.restore(tmp_path / "saved"),
        ValueError,
        "no adapter to be loaded",
    )
    other = attach(tiny_llama.load_model(DATA, fused=fused), fused, num_adapters=3)
    refused(other, lambda: other.restore(tmp_path / "saved"), ValueError, "lora_a: expected")
    refused(other, lambda: other.restore(tmp_path / "nothing"), OSError, "nothing")
    (tmp_path / "saved" / "multi_lora.ckpt").unlink()
    fresh = attach(tiny_llama.load_model(DATA, fused=fused), fused)
    refused(
        fresh, lambda: fresh.restore(tmp_path / "saved"), OSError, "No such file .*multi_lora.ckpt"
    )


def test_a_checkpoint_of_the_whole_model_routes_nothing(mode, tmp_path):
    def attached():
        model = Outer()
        return model, mal.MultiLora(model, ["q_proj"], 4, 2)

    model, lora = attached()
    base_names = {p.name for p in Outer().get_parameters()}
    banks = {p.name for target in lora._targets for p in target.cell.bank()}
    assert {p.name for p in model.get_parameters()} == base_names | banks
    lora.load_adapter(write(tmp_path / "a", {"inner.q_proj": weights(2, 8, 8)}), "a")
    lora.route(["a"])
    x = Tensor(np.ones((2, 8), np.float32))
    out = model(x).asnumpy()
    assert out[0].tobytes() != out[1].tobytes()
    ms.save_checkpoint(model, str(tmp_path / "whole.ckpt"))

    again, fresh = attached()
    missing, surplus = ms.load_param_into_net(
        again, ms.load_checkpoint(str(tmp_path / "whole.ckpt"))
    )
    assert not missing
    assert not surplus
    alone = again(x).asnumpy()
    assert alone[0].tobytes() == alone[1].tobytes() == out[1].tobytes()
    assert not fresh.adapters


def test_what_a_checkpoint_left_in_a_free_slot_is_no_part_of_an_adapter(tmp_path):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    model = Small()
    lora = mal.MultiLora(model, ["q_proj", "out"], 4, 2)
    for parameter in lora._targets[1].cell.bank():
        parameter.set_data(Tensor(np.ones(parameter.shape, np.float32)))
    lora.load_adapter(write(tmp_path / "a", {"q_proj": weights(2, 8, 4)}), "a")
    assert not any(parameter.asnumpy()[0].any() for parameter in lora._targets[1].cell.bank())


def test_a_checkpoint_of_the_base_fits_the_attached_model(mode):
    model, other = Small(), Small()
    ms.save_checkpoint(other, "base.ckpt")
    lora = mal.MultiLora(model, ["q_proj", "out", "0"], 4, 2)
    missing, _ = ms.load_param_into_net(model, ms.load_checkpoint("base.ckpt"))
    banks = [p.name for target in lora._targets for p in target.cell.bank()]
    assert sorted(missing) == sorted(banks)
    x = Tensor(np.ones((2, 8), np.float32))
    assert model(x).asnumpy().tobytes() == other(x).asnumpy().tobytes()


@pytest.fixture
def saved(tmp_path):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    lora = mal.MultiLora(Outer(), ["q_proj"], 4, 2)
    for name, value in (("a", 0.1), ("b", 0.2)):
        folder = write(tmp_path / name, {"inner.q_proj": weights(2, 8, 8, value)})
        lora.load_adapter(folder, name)
    lora.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_restored_into_a_model_that_is_a_part_of_another(saved):
    class Whole(nn.Cell):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def construct(self, x):
            return self.model(x)

    model = Outer()
    lora = mal.MultiLora(model, ["q_proj"], 4, 2)
    Whole(model)  # renames every parameter
    lora.restore(saved)
    assert list(lora.adapters) == ["a", "b"]
    lora.save(saved)
    other = mal.MultiLora(Outer(), ["q_proj"], 4, 2)
    other.restore(saved)
    assert everything(other) == everything(lora)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: "{", "multi_lora.json: "),
        (lambda table: "[]", "multi_lora.json: expected what save wrote"),
        (lambda table: "{}", "multi_lora.json: expected what save wrote"),
        (lambda table: table | {"adapters": {"a": {}}}, "adapters: a: "),
        (lambda table: table | {"adapters": {"a": table["adapters"]["a"] | {"slot": 2}}}, "slot"),
        (lambda table: table | {"adapters": {"a": table["adapters"]["a"] | {"slot": -1}}}, "slot"),
        (lambda table: table | {"adapters": {n: table["adapters"]["a"] for n in "ab"}}, "slot"),
        (lambda table: table | {"geometry": {}}, "lora_a: expected"),
        (lambda table: table | {"sizes": {}}, "sizes"),
    ],
)
def test_a_table_that_cannot_be_restored(saved, change, words):
    file = saved / "multi_lora.json"
    table = change(json.loads(file.read_text()))
    file.write_text(table if isinstance(table, str) else json.dumps(table))
    lora = mal.MultiLora(Outer(), ["q_proj"], 4, 2)
    refused(lora, lambda: lora.restore(saved), ValueError, words)


def test_banks_of_another_table_or_cut_are_refused(saved, tmp_path):
    other = mal.MultiLora(Outer(), ["q_proj"], 4, 2)
    other.load_adapter(tmp_path / "b", "a")
    other.save(tmp_path / "other")
    banks = saved / "multi_lora.ckpt"
    whole = banks.read_bytes()
    lora = mal.MultiLora(Outer(), ["q_proj"], 4, 2)
    for content in ((tmp_path / "other" / "multi_lora.ckpt").read_bytes(), whole[:-9], b""):
        banks.write_bytes(content)
        refused(lora, lambda: lora.restore(saved), ValueError, "multi_lora.ckpt: .*multi_lora.json")
    banks.write_bytes(whole)
    lora.restore(saved)
    assert list(lora.adapters) == ["a", "b"]


def test_a_step_holds_loads_deletes_and_routes_back(mode, tmp_path):
    model = Small()
    lora = mal.MultiLora(model, ["q_proj"], 4, 3)
    for number, name in enumerate("ab"):
        folder = write(tmp_path / name, {"q_proj": weights(2, 8, 4, 0.1 + number)})
        lora.load_adapter(folder, name)
    x = Tensor(np.ones((1, 8), np.float32))
    expected = {}
    for name in ("a", "b"):
        lora.route([name])
        expected[name] = model(x).asnumpy().tobytes()
    assert expected["a"] != expected["b"]
    errors = []

    def serve(name):
        try:
            for _ in range(60):
                with lora.step([name]):
                    out = model(x).asnumpy().tobytes()
                assert out == expected[name]
        except BaseException as error:
            errors.append(error)

    def churn():
        try:
            for _ in range(60):
                lora.load_adapter(tmp_path / "a", "c")
                lora.delete_adapter("c")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(name,)) for name in ("a", "b")]
    threads.append(threading.Thread(target=churn))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_a_load_reads_its_files_while_a_step_goes_on_and_writes_after_it(tmp_path, monkeypatch):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    lora = mal.MultiLora(Small(), ["q_proj"], 4, 3)
    folder = write(tmp_path / "a", {"q_proj": weights(2, 8, 4)})
    has_read = threading.Event()
    read_adapter = mal.peft.read_adapter

    def reading(*arguments, **options):
        adapter = read_adapter(*arguments, **options)
        has_read.set()
        return adapter

    monkeypatch.setattr(mal.peft, "read_adapter", reading)
    before = everything(lora)
    thread = threading.Thread(target=lora.load_adapter, args=(folder, "a"))
    with lora.step([None]):
        thread.start()
        assert has_read.wait(60)
        thread.join(0.2)
        assert thread.is_alive()
        assert everything(lora) == before
        assert not lora.adapters
    thread.join(60)
    assert list(lora.adapters) == ["a"]
    assert everything(lora) != before


def test_two_threads_that_load_the_same_name(tmp_path):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    lora = mal.MultiLora(Small(), ["q_proj"], 4, 3)
    folder = write(tmp_path / "a", {"q_proj": weights(2, 8, 4)})
    outcomes = []

    def load():
        try:
            lora.load_adapter(folder, "a")
            outcomes.append("loaded")
        except ValueError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count("loaded") == 1
    assert sum("expected a name that is not loaded" in one for one in outcomes) == 3
    assert lora.adapters["a"].slot == 0
