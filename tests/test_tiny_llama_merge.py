"""The example's Llama by itself: its logits, and those with each adapter merged into the weights, are PEFT's."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore_addlora.peft import read_adapter
from safetensors.numpy import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = EXAMPLES / "data" / "tiny_llama"
TOLERANCE = 1e-5  # a merged weight rounds differently from the sum of two products

spec = importlib.util.spec_from_file_location("tiny_llama", EXAMPLES / "tiny_llama.py")
tiny_llama = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tiny_llama  # MindSpore's compiler imports it by name
spec.loader.exec_module(tiny_llama)

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


@pytest.fixture(params=MODES)
def _mode(request):
    before = ms.get_context("mode")
    ms.set_context(mode=MODES[request.param])
    yield
    ms.set_context(mode=before)


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


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_logits(fused, expected):
    stored = load_file(DATA / "model.safetensors")
    input_ids = Tensor(expected["input_ids"])
    model = tiny_llama.load_model(DATA, fused=fused)
    base = model(input_ids)
    assert base.dtype == ms.float32
    assert base.shape == (6, 17, 256)
    base = base.asnumpy()
    np.testing.assert_allclose(base, expected["base_logits"], rtol=0, atol=TOLERANCE)

    for row, name in enumerate(expected["adapter_names"]):
        if name == tiny_llama.BASE:
            np.testing.assert_allclose(base[row], expected["logits"][row], rtol=0, atol=TOLERANCE)
            continue
        tiny_llama.load_weights(model, merged(stored, name))
        logits = model(input_ids).asnumpy()
        np.testing.assert_allclose(logits[row], expected["logits"][row], rtol=0, atol=TOLERANCE)
        assert (
            np.abs(logits[row] - base[row]).max() > 100 * TOLERANCE
        )  # or the comparison shows nothing


def test_the_adapters_are_those_of_the_batch(expected):
    assert {*tiny_llama.ADAPTERS, tiny_llama.BASE} == set(expected["adapter_names"])


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_module_paths_are_those_of_the_adapters(fused):
    paths = {path for path, _ in tiny_llama.load_model(DATA, fused=fused).cells_and_names()}
    parts = (
        {part: packed for packed, names in tiny_llama.PACKED.items() for part in names}
        if fused
        else {}
    )
    for name in tiny_llama.ADAPTERS:
        for path in read_adapter(DATA / name).modules:
            parent, _, last = path.rpartition(".")
            assert f"{parent}.{parts.get(last, last)}" in paths


def test_weights_of_another_model_are_refused():
    stored = load_file(DATA / "model.safetensors")
    model = tiny_llama.Llama(json.loads((DATA / "config.json").read_text()))
    with pytest.raises(
        ValueError, match=r"the model has no parameter for model\.layers\.9\.norm\.weight"
    ):
        tiny_llama.load_weights(
            model, stored | {"model.layers.9.norm.weight": stored["model.norm.weight"]}
        )
    with pytest.raises(ValueError, match=r"lm_head\.weight: expected the shape"):
        tiny_llama.load_weights(model, stored | {"lm_head.weight": np.ones((3, 64), np.float32)})
    del stored["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        tiny_llama.load_weights(model, stored)
