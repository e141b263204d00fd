"""The example's sentence encoder: its embeddings, those with merged adapters and those of a mixed batch are PEFT's.

The whole model runs where its package is installed; the stored arrays of two layers are compared everywhere.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore_addlora.peft import read_adapter
from safetensors.numpy import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = EXAMPLES / "data" / "minilm"
TOLERANCE = 1e-5

spec = importlib.util.spec_from_file_location("minilm", EXAMPLES / "minilm.py")
minilm = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = minilm  # MindSpore's compiler imports it by name
spec.loader.exec_module(minilm)

MODEL = minilm.find_model()
needs_model = pytest.mark.skipif(MODEL is None, reason=f"{minilm.PACKAGE} is not installed")
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "expected.npz") as file:
        return dict(file)


def merged(stored, name):
    """A copy of the weights, with the product of an adapter added to each that it adapts."""
    result = dict(stored)
    for path, lora in read_adapter(DATA / name).modules.items():
        result[f"{path}.weight"] = stored[f"{path}.weight"] + np.float32(lora.scaling) * (
            lora.b @ lora.a
        )
    return result


@needs_model
@pytest.mark.parametrize("mode", MODES)
def test_embeddings(mode, expected):
    before = ms.get_context("mode")
    ms.set_context(mode=MODES[mode])
    try:
        batch = [Tensor(expected[name]) for name in ("input_ids", "attention_mask")]
        model = minilm.load_model(MODEL)
        base = model(*batch).asnumpy()
        np.testing.assert_allclose(base, expected["base_embeddings"], rtol=0, atol=TOLERANCE)

        stored = load_file(MODEL / "model.safetensors")
        names = expected["adapter_names"]
        for name in set(names) - {minilm.BASE}:
            rows = names == name
            minilm.load_weights(model, merged(stored, name))
            embeddings = model(*batch).asnumpy()
            np.testing.assert_allclose(
                embeddings[rows], expected["embeddings"][rows], rtol=0, atol=TOLERANCE
            )
            assert np.abs(embeddings[rows] - base[rows]).max() > 100 * TOLERANCE
        rows = names == minilm.BASE
        np.testing.assert_allclose(base[rows], expected["embeddings"][rows], rtol=0, atol=TOLERANCE)
    finally:
        ms.set_context(mode=before)


@needs_model
def test_tokens(expected):
    pytest.importorskip("tokenizers")
    ids, mask = minilm.tokenize(MODEL, [str(sentence) for sentence in expected["sentences"]])
    np.testing.assert_array_equal(ids, expected["input_ids"])
    np.testing.assert_array_equal(mask, expected["attention_mask"])
    assert ids.dtype == mask.dtype == np.int32


def test_module_paths_are_those_of_the_adapters():
    config = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 6,
        "type_vocab_size": 2,
        "vocab_size": 16,
    }
    paths = {path for path, _ in minilm.MiniLM(config).cells_and_names()}
    for name in minilm.ADAPTERS:
        assert set(read_adapter(DATA / name).modules) <= paths


@pytest.fixture(params=MODES)
def mode(request):
    before = ms.get_context("mode")
    ms.set_context(mode=MODES[request.param])
    yield request.param
    ms.set_context(mode=before)


def names_of(expected):
    return [None if name == minilm.BASE else str(name) for name in expected["adapter_names"]]


@needs_model
def test_a_mixed_batch_of_the_whole_model(mode, expected):
    model = minilm.load_model(MODEL)
    batch = [Tensor(expected[name]) for name in ("input_ids", "attention_mask")]
    base = model(*batch).asnumpy()
    targets = ["query", "key", "value", "intermediate.dense"]
    lora = mal.MultiLora(model, targets, max_rank=64, num_adapters=3)
    for name in minilm.ADAPTERS:
        lora.load_adapter(DATA / name, name)
    lora.route(names_of(expected))
    embeddings = model(*batch).asnumpy()
    np.testing.assert_allclose(embeddings, expected["embeddings"], rtol=0, atol=1e-4)
    for row, name in enumerate(names_of(expected)):
        if name is None:
            assert embeddings[row].tobytes() == base[row].tobytes()
        else:
            assert np.abs(embeddings[row] - base[row]).max() > 1e-3


class StoredLayers(nn.Cell):
    """The two dense cells whose arrays are stored, at the paths that they have in the whole model."""

    def __init__(self, stored):
        super().__init__()
        for name in ("layer.0.attention.self.query", "layer.5.attention.self.value"):
            dense = nn.Dense(384, 384)
            dense.weight.set_data(Tensor(stored[f"{name}.weight"]))
            dense.bias.set_data(Tensor(stored[f"{name}.bias"]))
            self.insert_child_to_cell(name.replace(".", "_"), dense)

    def construct(self, first, second):
        return (
            self.layer_0_attention_self_query(first),
            self.layer_5_attention_self_value(second),
        )


def test_a_mixed_batch_of_the_stored_layers(mode, expected, tmp_path):
    paths = ["layer.0.attention.self.query", "layer.5.attention.self.value"]
    model = StoredLayers(expected)
    batch = [Tensor(expected[f"{path}.input"]) for path in paths]
    base = [one.asnumpy() for one in model(*batch)]
    lora = mal.MultiLora(
        model,
        [path.replace(".", "_") for path in paths],
        max_rank=64,
        num_adapters=3,
        rename={"_": "."},
    )
    for name in minilm.ADAPTERS:
        adapter = read_adapter(DATA / name)
        modules = {path: adapter.modules[f"encoder.{path}"] for path in paths}
        mal.peft.write_adapter(tmp_path / name, modules)
        lora.load_adapter(tmp_path / name, name)
    lora.route(names_of(expected))
    for path, out, alone in zip(paths, model(*batch), base, strict=True):
        np.testing.assert_allclose(out.asnumpy(), expected[f"{path}.output"], rtol=0, atol=1e-4)
        for row, name in enumerate(names_of(expected)):
            same = out.asnumpy()[row].tobytes() == alone[row].tobytes()
            assert same == (name is None)
