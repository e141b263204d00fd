"""Reading and writing PEFT folders: what is honoured, and that everything else is refused with a reason."""

from __future__ import annotations

import dataclasses
import doctest
import functools
import importlib.util
import json
import math
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore_addlora import peft
from mindspore_addlora.peft import LoraWeights, PeftError, read_adapter, targeted, write_adapter
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parents[1] / "examples" / "data"

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
IN, OUT, R = 6, 5, 4
PATHS = (
    "model.layers.0.q_proj",
    "model.layers.0.v_proj",
    "model.layers.1.q_proj",
    "model.layers.1.v_proj",
)
CONFIG = {"peft_type": "LORA", "r": R, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def name_of(path, side, prefix="base_model.model.", adapter=""):
    return f"{prefix}{path}.lora_{side}{adapter}.weight"


def weights(rank=R, scaling=2.0, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (
        rng.standard_normal((rank, IN)).astype(dtype),
        rng.standard_normal((OUT, rank)).astype(dtype),
    )
    return LoraWeights(a, b, scaling, rank)


def tensors(ranks=None, dtype=np.float32, **naming):
    result = {}
    for seed, (path, rank) in enumerate((ranks or dict.fromkeys(PATHS, R)).items()):
        lora = weights(rank, dtype=dtype, seed=seed)
        result[name_of(path, "A", **naming)] = lora.a
        result[name_of(path, "B", **naming)] = lora.b
    return result


class Folder:
    """A PEFT folder, as PEFT would write it until something is changed."""

    def __init__(self, path):
        self.path = path
        path.mkdir(exist_ok=True)
        self.config_file = path / "adapter_config.json"
        self.weights_file = path / "adapter_model.safetensors"
        self.config()
        self.tensors(tensors())

    def config(self, *without, **changes):
        config = {key: value for key, value in {**CONFIG, **changes}.items() if key not in without}
        self.config_file.write_text(json.dumps(config))
        return self

    def tensors(self, stored):
        save_file(stored, self.weights_file, metadata={"format": "pt"})
        return self

    def read(self, **arguments):
        return read_adapter(self.path, **arguments)

    def refusal(self, file, key, reason, **arguments):
        """The reader refuses with this file and key, and a reason that contains these words."""
        with pytest.raises(PeftError) as caught:
            self.read(**arguments)
        error = caught.value
        assert error.file == str(file)
        assert error.key == key
        assert reason in error.reason
        assert str(error) == ": ".join(part for part in (str(file), key, error.reason) if part)
        assert isinstance(error, ValueError)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "adapter")


# What is honoured: the real adapters

REAL = {
    "tiny_llama/qv_r8": (4, {"": (8, 2.0)}),
    "tiny_llama/attn_r16_rslora": (8, {"": (16, 8.0)}),
    "tiny_llama/mlp_r32": (6, {"": (32, 0.25)}),
    "tiny_llama/all_r4_pattern": (
        14,
        {"q_proj": (12, 4 / 12), "down_proj": (4, 8.0), "": (4, 1.0)},
    ),
    "minilm/legal_r8": (12, {"": (8, 16 / math.sqrt(8))}),
    "minilm/support_r16": (18, {"": (16, 2.0)}),
    "minilm/code_r64": (18, {"": (64, 1.0)}),
}


@pytest.mark.parametrize("name", REAL)
def test_real_adapter(name):
    count, expected = REAL[name]
    adapter = read_adapter(DATA / name)
    stored = load_file(DATA / name / "adapter_model.safetensors")
    assert adapter.path == str(DATA / name)
    assert adapter.config == json.loads((DATA / name / "adapter_config.json").read_text())
    assert len(adapter.modules) == count == len(stored) // 2
    assert list(adapter.modules) == sorted(adapter.modules)
    for path, lora in adapter.modules.items():
        rank, scaling = next(values for end, values in expected.items() if path.endswith(end))
        assert (lora.rank, lora.scaling) == (rank, scaling)
        np.testing.assert_array_equal(lora.a, stored[name_of(path, "A")])
        np.testing.assert_array_equal(lora.b, stored[name_of(path, "B")])
        assert lora.a.shape[0] == lora.b.shape[1] == rank
    assert targeted(adapter.config, adapter.modules) == list(adapter.modules)


def test_one_real_projection_is_what_peft_computed():
    expected = np.load(DATA / "minilm" / "expected.npz")
    for key in ("layer.0.attention.self.query", "layer.5.attention.self.value"):
        x, y = expected[f"{key}.input"], expected[f"{key}.output"]
        for row, name in enumerate(expected["adapter_names"]):
            out = x[row] @ expected[f"{key}.weight"].T + expected[f"{key}.bias"]
            if name != "__base__":
                lora = read_adapter(DATA / "minilm" / name).modules[f"encoder.{key}"]
                out = out + lora.scaling * (x[row] @ lora.a.T) @ lora.b.T
            np.testing.assert_allclose(out, y[row], atol=2e-5, rtol=0)


# What is honoured: each feature


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_dtype_is_read_as_it_is(folder, dtype):
    stored = tensors(dtype=dtype)
    modules = folder.tensors(stored).read().modules
    assert tuple(modules) == PATHS
    for path, lora in modules.items():
        assert lora.a.dtype == lora.b.dtype == dtype
        assert lora.a.tobytes() == stored[name_of(path, "A")].tobytes()
        assert lora.b.tobytes() == stored[name_of(path, "B")].tobytes()


@pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed"
)
@pytest.mark.parametrize("first", ["mindspore", "mindspore_addlora.peft"])
def test_bfloat16_beside_mindspores_type_of_that_name(folder, first):
    """MindSpore gives numpy a second bfloat16; what is read is ml_dtypes' all the same, and both can be written."""
    folder.tensors(tensors(dtype=ml_dtypes.bfloat16))
    code = f"""
import {first}
import mindspore, ml_dtypes, numpy as np
from mindspore_addlora.peft import LoraWeights, read_adapter, write_adapter
modules = read_adapter({str(folder.path)!r}).modules
for lora in modules.values():
    assert lora.a.dtype == lora.b.dtype == ml_dtypes.bfloat16
theirs = {{
    path: LoraWeights(*(mindspore.Tensor(m.astype(np.float32)).astype(mindspore.bfloat16).asnumpy()
                        for m in (lora.a, lora.b)), lora.scaling, lora.rank)
    for path, lora in modules.items()
}}
assert next(iter(theirs.values())).a.dtype != ml_dtypes.bfloat16
write_adapter({str(folder.path / "again")!r}, theirs)
for path, lora in read_adapter({str(folder.path / "again")!r}).modules.items():
    assert lora.a.tobytes() == modules[path].a.tobytes() and lora.b.tobytes() == modules[path].b.tobytes()
    assert lora.a.dtype == lora.b.dtype == ml_dtypes.bfloat16
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_path_may_be_a_str_or_a_path(folder):
    assert read_adapter(str(folder.path)).path == read_adapter(folder.path).path == str(folder.path)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 0.75),
        ({"lora_alpha": 2.5}, 0.625),
        ({"lora_alpha": 0}, 0.0),
        ({"lora_alpha": -8}, -2.0),
        ({"use_rslora": True}, 4.0),
        ({"use_rslora": False}, 2.0),
        ({"use_rslora": None}, 2.0),
    ],
)
def test_scaling(folder, changes, scaling):
    modules = folder.config(**changes).read().modules
    assert {lora.scaling for lora in modules.values()} == {scaling}


def test_pefts_defaults_where_r_and_alpha_are_missing(folder):
    folder.config("r", "lora_alpha").tensors(tensors(dict.fromkeys(PATHS, 8)))
    assert {(lora.rank, lora.scaling) for lora in folder.read().modules.values()} == {(8, 1.0)}


PATTERNS = {
    "the end of a path": ({"q_proj": 2}, [2, R, 2, R]),
    "several levels": ({"0.q_proj": 2}, [2, R, R, R]),
    "a whole path": ({"model.layers.1.v_proj": 2}, [R, R, R, 2]),
    "an anchored path": ({r"^model\.layers\.1\.v_proj": 2}, [R, R, R, 2]),
    "a regular expression": ({r"layers\.\d+\.(q|v)_proj": 2}, [2, 2, 2, 2]),
    "alternatives stay together": ({"0.q_proj|1.v_proj": 2}, [2, R, R, 2]),
    "the first match counts": ({"0.q_proj": 2, "q_proj": 3}, [2, R, 3, R]),
    "not the middle of a name": ({"proj": 2}, [R, R, R, R]),
    "not the middle of a path": ({"layers.0": 2}, [R, R, R, R]),
    "nothing": ({}, [R, R, R, R]),
    "null": (None, [R, R, R, R]),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_rank_pattern(folder, case):
    pattern, ranks = PATTERNS[case]
    folder.config(rank_pattern=pattern).tensors(tensors(dict(zip(PATHS, ranks, strict=True))))
    modules = folder.read().modules
    assert [modules[path].rank for path in PATHS] == ranks
    assert [modules[path].scaling for path in PATHS] == [8 / rank for rank in ranks]


@pytest.mark.parametrize("case", PATTERNS)
def test_alpha_pattern(folder, case):
    pattern, expected = PATTERNS[case]
    alphas = [8 if value == R else value for value in expected]
    modules = folder.config(alpha_pattern=pattern).read().modules
    assert [modules[path].scaling for path in PATHS] == [alpha / R for alpha in alphas]


def test_both_patterns_with_rslora(folder):
    folder.config(use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"1.q_proj": 5})
    folder.tensors(tensors(dict(zip(PATHS, [2, R, 2, R], strict=True))))
    modules = folder.read().modules
    assert [modules[path].scaling for path in PATHS] == [
        8 / math.sqrt(2),
        4.0,
        5 / math.sqrt(2),
        4.0,
    ]


LLAMA = [
    f"model.layers.{layer}.{block}"
    for layer in (0, 1, 11)
    for block in ("self_attn.q_proj", "self_attn.k_proj", "mlp.experts.3.up_proj")
]

TARGETS = {
    "ends": ({"target_modules": ["q_proj"]}, [0, 3, 6]),
    "an end of several levels": ({"target_modules": ["self_attn.k_proj"]}, [1, 4, 7]),
    "only whole names": ({"target_modules": ["proj", "_proj", "attn.q_proj"]}, []),
    "whole paths": ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, [3]),
    "a list takes dots literally": ({"target_modules": ["self.attn.q_proj", ".*"]}, []),
    "an empty list": ({"target_modules": []}, []),
    "a regular expression": ({"target_modules": r".*\.(q|k)_proj"}, [0, 1, 3, 4, 6, 7]),
    "the whole path must match": ({"target_modules": "q_proj"}, []),
    "all-linear": ({"target_modules": "all-linear"}, list(range(9))),
    "all-linear in capitals": ({"target_modules": "ALL-Linear"}, list(range(9))),
    "one layer": ({"target_modules": ["q_proj"], "layers_to_transform": 1}, [3]),
    "layer 0": ({"target_modules": ["q_proj"], "layers_to_transform": 0}, [0]),
    "some layers": (
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0, 11]},
        [0, 1, 6, 7],
    ),
    "no layers means every layer": (
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        [0, 3, 6],
    ),
    "the first index is the layer": (
        {"target_modules": ["up_proj"], "layers_to_transform": [3]},
        [],
    ),
    "whole paths are exempt from layers": (
        {"target_modules": ["model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
        [3],
    ),
    "a list of layers by name": (
        {"target_modules": ["up_proj"], "layers_to_transform": [3], "layers_pattern": "experts"},
        [2, 5, 8],
    ),
    "lists of layers by name": (
        {
            "target_modules": ["up_proj"],
            "layers_to_transform": [1],
            "layers_pattern": ["h", "layers"],
        },
        [5],
    ),
    "no such list of layers": (
        {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]},
        [],
    ),
    "empty names of lists": (
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": []},
        [3],
    ),
    "exclude ends": (
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        [0, 3, 6],
    ),
    "exclude a path": (
        {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        [3, 6],
    ),
    "exclude by regular expression": (
        {"target_modules": "all-linear", "exclude_modules": r".*layers\.1?1\..*"},
        [0, 1, 2],
    ),
    "exclude wins over whole paths": (
        {"target_modules": [LLAMA[0], LLAMA[1]], "exclude_modules": ["q_proj"]},
        [1],
    ),
    "exclude nothing": ({"target_modules": ["q_proj"], "exclude_modules": []}, [0, 3, 6]),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets(folder, case):
    changes, expected = TARGETS[case]
    assert targeted({**CONFIG, **changes}, LLAMA) == [LLAMA[index] for index in expected]
    if expected:
        # The reader follows the same rule: these tensors and no others.
        folder.config(**changes).tensors(tensors({LLAMA[index]: R for index in expected}))
        assert set(folder.read().modules) == {LLAMA[index] for index in expected}
        missed = next(iter(set(range(9)) - set(expected)), None)
        if missed is not None:
            folder.tensors(tensors({LLAMA[index]: R for index in [*expected, missed]}))
            folder.refusal(
                folder.weights_file, name_of(LLAMA[missed], "A"), "does not target the module"
            )


def test_a_path_that_begins_with_its_list_of_layers_needs_layers_pattern():
    """As in PEFT: without the name of the list, a layer's index is found only behind two names."""
    config = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    assert targeted(config, ["layers.1.q_proj"]) == []
    assert targeted({**config, "layers_pattern": "layers"}, ["layers.1.q_proj"]) == [
        "layers.1.q_proj"
    ]


def test_a_layer_number_beyond_any_model():
    """Python refuses to convert it, and that must not come out."""
    config = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    assert targeted(config, [f"model.layers.{'1' * 5000}.q_proj"]) == []


@pytest.mark.parametrize("fan_in_fan_out", [True, False, None])
def test_fan_in_fan_out_leaves_a_and_b_as_they_are(folder, fan_in_fan_out):
    lora = folder.config(fan_in_fan_out=fan_in_fan_out).read().modules[PATHS[0]]
    assert lora.a.shape == (R, IN)
    assert lora.b.shape == (OUT, R)


@pytest.mark.parametrize(
    "init", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"]
)
def test_inits_that_leave_the_base_alone(folder, init):
    assert len(folder.config(init_lora_weights=init).read().modules) == 4


def test_inert_and_switched_off_keys_are_accepted(folder):
    inert = {
        key: {"set": ["to", "something"]} for key in peft.INERT_KEYS if key != "fan_in_fan_out"
    }
    off = dict.fromkeys(peft.REFUSED_KEYS)
    empty = {
        "modules_to_save": [],
        "layer_replication": [],
        "target_parameters": [],
        "use_dora": False,
    }
    unknown = {"next_year": None, "next_decade": False, "next_century": 0, "much_later": {}}
    assert len(folder.config(**inert, **off | empty, **unknown).read().modules) == 4


@pytest.mark.parametrize(
    "naming",
    [
        {},
        {"prefix": ""},
        {"adapter": ".default"},
        {"adapter": ".legal"},
        {"prefix": "", "adapter": ".default"},
    ],
)
def test_tensor_names(folder, naming):
    assert tuple(folder.tensors(tensors(**naming)).read().modules) == PATHS


def test_max_rank(folder):
    assert folder.read(max_rank=R).modules[PATHS[0]].rank == R


# What is refused: the configuration

MISSING = object()

BAD_CONFIGS = {
    "another method": ("peft_type", "IA3", 'only "LORA" can be honoured, not "IA3"'),
    "another case": ("peft_type", "lora", 'only "LORA"'),
    "no method": ("peft_type", MISSING, 'missing; it must be "LORA"'),
    "null method": ("peft_type", None, 'only "LORA"'),
    "DoRA": ("use_dora", True, "DoRA rescales the adapted weight"),
    "lora_bias": ("lora_bias", True, "adds a bias"),
    "bias all": ("bias", "all", 'only "none" can be honoured, not "all"'),
    "bias lora_only": ("bias", "lora_only", 'only "none"'),
    "bias null": ("bias", None, 'only "none"'),
    "modules_to_save": ("modules_to_save", ["classifier"], 'whole modules were trained and saved; they would'),
    "layer_replication": ("layer_replication", [[0, 4], [2, 5]], "layers are repeated"),
    "target_parameters": ("target_parameters", ["experts.gate_up_proj"], "bare parameters"),
    "trainable tokens": ("trainable_token_indices", [1, 2], "rows of the embedding"),
    "no trainable tokens, but on": ("trainable_token_indices", [], "rows of the embedding"),
    "aLoRA": ("alora_invocation_tokens", [5, 6], "activated LoRA"),
    "aLoRA without tokens, but on": ("alora_invocation_tokens", [], "activated LoRA"),
    "QA-LoRA": ("use_qalora", True, "pools the input"),
    "BD-LoRA": ("use_bdlora", {"nblocks": 2}, "block-diagonal"),
    "BD-LoRA as it comes": ("use_bdlora", {}, "block-diagonal"),
    "Arrow": ("arrow_config", {"top_k": 3}, "router"),
    "KaSA": ("kasa_config", {}, "changes the base weights"),
    "MonteCLoRA": ("monteclora_config", {"num_samples": 8}, "samples"),
    "VeLoRA": ("velora_config", {"num_groups": 64}, "more than A and B"),
    "fused layers of early PEFT": ("enable_lora", [True, False, True], "fused layer"),
    "not even a flag": ("use_dora", "no", "DoRA"),
    "unknown flag": ("use_wora", True, "unknown, and set to true: whether it changes the result cannot be told"),
    "unknown text": ("mode", "fast", 'unknown, and set to "fast"'),
    "unknown and deep": ("mode", functools.reduce(lambda inner, _: [inner], range(600), 1), "unknown, and set to "),
    "PiSSA": ("init_lora_weights", "pissa", '"pissa" changes the base weights whenever PEFT loads the adapter'),
    "fast PiSSA": ("init_lora_weights", "pissa_niter_16", "changes the base weights"),
    "OLoRA": ("init_lora_weights", "olora", "changes the base weights"),
    "CorDA": ("init_lora_weights", "corda", "changes the base weights"),
    "LoftQ": ("init_lora_weights", "loftq", "changes the base weights"),
    "LoRA-GA": ("init_lora_weights", "lora_ga", "changes the base weights"),
    "unknown init": ("init_lora_weights", "lucky", '"lucky" is unknown'),
    "init of another type": ("init_lora_weights", 1, "1 is unknown"),
    "r as text": ("r", "8", 'expected a positive integer, got "8"'),
    "r = 0": ("r", 0, "expected a positive integer, got 0"),
    "r = -1": ("r", -1, "expected a positive integer, got -1"),
    "r true": ("r", True, "expected a positive integer, got true"),
    "r with a point": ("r", 4.0, "expected a positive integer, got 4.0"),
    "r null": ("r", None, "expected a positive integer, got null"),
    "r a list": ("r", [4], "expected a positive integer, got [4]"),
    "alpha NaN": ("lora_alpha", math.nan, "expected a finite number, got NaN"),
    "alpha infinite": ("lora_alpha", math.inf, "expected a finite number, got Infinity"),
    "alpha beyond float64": ("lora_alpha", 10**400, "expected a finite number, got 1000000"),
    "alpha as text": ("lora_alpha", "16", 'expected a finite number, got "16"'),
    "alpha true": ("lora_alpha", True, "expected a finite number, got true"),
    "alpha null": ("lora_alpha", None, "expected a finite number, got null"),
    "rslora as text": ("use_rslora", "false", 'expected true or false, got "false"'),
    "rslora a number": ("use_rslora", 1, "expected true or false, got 1"),
    "fan_in_fan_out as text": ("fan_in_fan_out", "yes", 'expected true or false, got "yes"'),
    "rank_pattern a list": ("rank_pattern", ["q_proj"], 'expected an object, got ["q_proj"]'),
    "alpha_pattern a number": ("alpha_pattern", 5, "expected an object, got 5"),
    "no targets": ("target_modules", None, "missing: PEFT then chooses by the base model's type"),
    "missing targets": ("target_modules", MISSING, "missing: PEFT then chooses"),
    "targets a number": ("target_modules", 3, "expected a list of strings or a string, got 3"),
    "targets of numbers": ("target_modules", ["q_proj", 3], "expected a list of strings or a string"),
    "targets broken": ("target_modules", "(q_proj", '"(q_proj" is not a regular expression: missing )'),
    "targets beyond re": ("target_modules", "a{99999999999999999999}", "is not a regular expression"),
    "exclude a number": ("exclude_modules", 3, "expected a list of strings or a string, got 3"),
    "exclude broken": ("exclude_modules", "*", "is not a regular expression"),
    "layers as text": ("layers_to_transform", "1", 'expected integers, got "1"'),
    "layers true": ("layers_to_transform", [True], "expected integers, got [true]"),
    "layers_pattern alone": ("layers_pattern", "layers", "cannot be used without layers_to_transform"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_refused_configuration(folder, case):
    key, value, reason = BAD_CONFIGS[case]
    if value is MISSING:
        folder.config(key)
    else:
        folder.config(**{key: value})
    folder.refusal(folder.config_file, key, reason)


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        (
            {"rank_pattern": {"q_proj": 0}},
            'rank_pattern["q_proj"]',
            "expected a positive integer, got 0",
        ),
        (
            {"rank_pattern": {"q_proj": "8"}},
            'rank_pattern["q_proj"]',
            'expected a positive integer, got "8"',
        ),
        (
            {"alpha_pattern": {"q_proj": math.nan}},
            'alpha_pattern["q_proj"]',
            "expected a finite number, got NaN",
        ),
        (
            {"rank_pattern": {"q_(proj": 8}},
            'rank_pattern["q_(proj"]',
            "is not a regular expression",
        ),
        ({"alpha_pattern": {"a)(b": 8}}, 'alpha_pattern["a)(b"]', "is not a regular expression"),
        (
            {"target_modules": ".*", "layers_to_transform": [1]},
            "layers_to_transform",
            'cannot be used with a target_modules that is a string, ".*"',
        ),
        (
            {"target_modules": ".*", "layers_pattern": []},
            "layers_pattern",
            "cannot be used with a target_modules that is a string",
        ),
        (
            {"layers_to_transform": [1], "layers_pattern": 7},
            "layers_pattern",
            "expected a string or a list of strings, got 7",
        ),
        (
            {"layers_to_transform": [1], "layers_pattern": ["("]},
            "layers_pattern",
            "is not a regular expression",
        ),
    ],
)
def test_refused_patterns(folder, changes, key, reason):
    folder.config(**changes).refusal(folder.config_file, key, reason)


def test_targeted_refuses_what_the_reader_refuses():
    with pytest.raises(PeftError, match=r"adapter_config\.json: target_modules: missing"):
        targeted({}, PATHS)
    with pytest.raises(
        PeftError, match=r"adapter_config\.json: exclude_modules: .* is not a regular expression"
    ):
        targeted({"target_modules": ["q_proj"], "exclude_modules": "("}, PATHS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not JSON: Expecting value"),
        (b'{"r": 8', "not JSON: "),
        (b'{"r": 8,}', "not JSON: "),
        (b"\xff\xfe\x00", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b'{"r": ' + b"9" * 5000 + b"}", "not JSON: "),
        (b"[1, 2]", "expected a JSON object, got [1, 2]"),
        (b'"LORA"', 'expected a JSON object, got "LORA"'),
        (b"null", "expected a JSON object, got null"),
    ],
    ids=["empty", "cut", "comma", "not text", "deep", "long", "list", "string", "null"],
)
def test_broken_json(folder, text, reason):
    folder.config_file.write_bytes(text)
    folder.refusal(folder.config_file, "", reason)


# What is refused: the weights


@pytest.mark.parametrize("side", "AB")
def test_a_without_b_and_b_without_a(folder, side):
    stored = tensors()
    del stored[name_of(PATHS[1], side)]
    folder.tensors(stored).refusal(folder.weights_file, PATHS[1], f"lora_{side} is missing")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.classifier.weight", "neither lora_A.weight nor lora_B.weight"),
        ("base_model.model.model.norm.weight", "neither lora_A.weight nor lora_B.weight"),
        ("base_model.model.model.layers.0.q_proj.bias", "neither lora_A.weight nor lora_B.weight"),
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "neither lora_A.weight"),
        ("base_model.model.model.layers.0.q_proj.lora_velora_embed", "neither lora_A.weight"),
        ("base_model.model.model.layers.0.q_proj.lora_magnitude_vector", "a magnitude of DoRA"),
        (
            "base_model.model.model.layers.0.q_proj.lora_magnitude_vector.weight",
            "a magnitude of DoRA",
        ),
        ("base_model.model.model.layers.0.q_proj.lora_B.bias", "a bias of the adapter"),
        ("base_model.model.model.layers.0.q_proj.lora_B.default.bias", "a bias of the adapter"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "an adapted embedding"),
        ("base_model.model.model.embed_tokens.lora_embedding_B", "an adapted embedding"),
        ("lora_A.weight", "neither lora_A.weight"),
        ("", "neither lora_A.weight"),
    ],
)
def test_surplus_tensors(folder, name, reason):
    folder.tensors(tensors() | {name: np.ones((R, IN), np.float32)})
    folder.refusal(folder.weights_file, name, reason)


def test_tensors_of_a_module_that_is_not_targeted(folder):
    folder.tensors(tensors(dict.fromkeys([*PATHS, "model.layers.0.o_proj"], R)))
    name = name_of("model.layers.0.o_proj", "A")
    folder.refusal(
        folder.weights_file,
        name,
        "adapter_config.json does not target the module model.layers.0.o_proj",
    )


@pytest.mark.parametrize(
    "second",
    [
        {"adapter": ".legal"},
        {"adapter": ".default"},
        {"prefix": ""},
        {"prefix": "", "adapter": ".x"},
    ],
)
def test_two_adapters_in_a_file(folder, second):
    folder.tensors(tensors() | tensors(**second))
    with pytest.raises(PeftError, match="the file holds the tensors of more than one adapter"):
        folder.read()


def test_no_tensors(folder):
    folder.tensors({}).refusal(folder.weights_file, "", "there are no LoRA tensors in it")


@pytest.mark.parametrize(
    ("side", "shape", "reason"),
    [
        ("A", (R + 1, IN), "the rank of this module is 4: expected [4, in], got [5, 6]"),
        ("A", (IN, R), "the rank of this module is 4: expected [4, in], got [6, 4]"),
        ("B", (OUT, R - 1), "the rank of this module is 4: expected [out, 4], got [5, 3]"),
        ("B", (R, OUT), "the rank of this module is 4: expected [out, 4], got [4, 5]"),
        ("A", (R,), "expected a matrix, got the shape [4]"),
        ("A", (), "expected a matrix, got the shape []"),
        ("A", (R, IN, 1, 1), "expected a matrix, got the shape [4, 6, 1, 1]"),
        ("A", (R, 0), "expected a matrix, got the shape [4, 0]"),
        ("B", (0, R), "expected a matrix, got the shape [0, 4]"),
    ],
)
def test_shapes_that_do_not_fit(folder, side, shape, reason):
    name = name_of(PATHS[2], side)
    folder.tensors(tensors() | {name: np.ones(shape, np.float32)}).refusal(
        folder.weights_file, name, reason
    )


def test_the_rank_must_be_that_of_the_pattern(folder):
    folder.config(rank_pattern={"1.q_proj": 2})
    folder.refusal(
        folder.weights_file,
        name_of(PATHS[2], "A"),
        "the rank of this module is 2: expected [2, in], got [4, 6]",
    )


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [
        (np.int8, "I8"),
        (np.int32, "I32"),
        (np.bool_, "BOOL"),
        (np.float64, "F64"),
        (np.uint16, "U16"),
    ],
)
def test_other_dtypes(folder, dtype, shown):
    name = name_of(PATHS[0], "B")
    folder.tensors(tensors() | {name: np.ones((OUT, R), dtype)})
    folder.refusal(folder.weights_file, name, f"expected float32, float16, bfloat16, got {shown}")


def test_rank_above_max_rank(folder):
    folder.config(rank_pattern={"1.q_proj": 8}).tensors(
        tensors(dict(zip(PATHS, [R, R, 8, R], strict=True)))
    )
    reason = "the rank of this module is 8, above max_rank, which is 7"
    folder.refusal(folder.weights_file, name_of(PATHS[2], "A"), reason, max_rank=7)
    assert folder.read(max_rank=8).modules[PATHS[2]].rank == 8


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), ("8", TypeError), (True, TypeError)]
)
def test_max_rank_must_be_a_positive_integer(folder, value, error):
    with pytest.raises(error, match="max_rank: expected"):
        folder.read(max_rank=value)


def test_a_file_cut_anywhere(folder):
    whole = folder.weights_file.read_bytes()
    for length in [*range(0, 200, 7), len(whole) // 2, len(whole) - 1]:
        folder.weights_file.write_bytes(whole[:length])
        folder.refusal(folder.weights_file, "", "not a whole safetensors file: ")


def header(**entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


A, B = name_of(PATHS[0], "A"), name_of(PATHS[0], "B")
SIZE_A, SIZE_B = 4 * R * IN, 4 * OUT * R

LIES = {
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "a header beyond the end": struct.pack("<Q", 1000) + b"{}",
    "a header that is not JSON": struct.pack("<Q", 2) + b"{!",
    "overlapping tensors": header(
        **{
            A: {"dtype": "F32", "shape": [R, IN], "data_offsets": [0, SIZE_A]},
            B: {"dtype": "F32", "shape": [OUT, R], "data_offsets": [SIZE_A - SIZE_B, SIZE_A]},
        }
    ) + bytes(SIZE_A),
    "a hole": header(
        **{
            A: {"dtype": "F32", "shape": [R, IN], "data_offsets": [0, SIZE_A]},
            B: {"dtype": "F32", "shape": [OUT, R], "data_offsets": [SIZE_A + 8, SIZE_A + 8 + SIZE_B]},
        }
    ) + bytes(SIZE_A + 8 + SIZE_B),
    "sizes of 2^63": header(
        **{A: {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 1 << 63]}}
    ) + bytes(64),
    "a shape that overflows to nothing": header(
        **{A: {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}}
    ),
    "a shape larger than its data": header(
        **{A: {"dtype": "F32", "shape": [R, IN * 2], "data_offsets": [0, SIZE_A]}}
    ) + bytes(SIZE_A),
    "bytes after the last tensor": header(
        **{A: {"dtype": "F32", "shape": [R, IN], "data_offsets": [0, SIZE_A]}}
    ) + bytes(SIZE_A + 4),
    "an unknown dtype": header(
        **{A: {"dtype": "F33", "shape": [R, IN], "data_offsets": [0, SIZE_A]}}
    ) + bytes(SIZE_A),
    "a negative shape": header(
        **{A: {"dtype": "F32", "shape": [-R, -IN], "data_offsets": [0, SIZE_A]}}
    ) + bytes(SIZE_A),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_header_that_lies(folder, case):
    folder.weights_file.write_bytes(LIES[case])
    folder.refusal(folder.weights_file, "", "not a whole safetensors file: ")


# What is refused: the folder


def test_missing_files(folder):
    folder.weights_file.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(folder.weights_file))):
        folder.read()
    folder.config_file.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(folder.config_file))):
        folder.read()
    with pytest.raises(FileNotFoundError, match=r"nowhere.adapter_config\.json"):
        read_adapter("nowhere")


def test_a_file_in_place_of_a_folder_and_a_folder_in_place_of_a_file(folder):
    with pytest.raises(OSError, match="adapter_config"):
        read_adapter(folder.config_file)
    folder.weights_file.unlink()
    folder.weights_file.mkdir()
    with pytest.raises(OSError, match=r"adapter_model\.safetensors"):
        folder.read()


class Trap:
    def __reduce__(self):
        return os.mkdir, ("the_pickle_was_read",)


def test_a_pickle_is_never_read(folder, monkeypatch):
    monkeypatch.chdir(folder.path)
    folder.weights_file.unlink()
    pickled = folder.path / "adapter_model.bin"
    pickled.write_bytes(pickle.dumps(Trap()))
    folder.refusal(pickled, "", "torch.load('adapter_model.bin', weights_only=True)")
    folder.tensors(tensors())  # beside the right file it does not matter
    assert len(folder.read().modules) == 4
    assert not (folder.path / "the_pickle_was_read").exists()


# Nothing else comes out, whatever goes in


@settings(max_examples=300)
@given(data=st.data())
def test_a_changed_weights_file_is_read_or_refused(tmp_path_factory, data):
    folder = Folder(tmp_path_factory.getbasetemp() / "changed_weights")
    content = bytearray(folder.weights_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # The header is where the damage is interesting.
        position = data.draw(st.one_of(st.integers(0, 900), st.integers(0, len(content) - 1)))
        content[position] = data.draw(st.integers(0, 255))
    folder.weights_file.write_bytes(content)
    try:
        modules = folder.read().modules
    except PeftError as error:
        assert error.file == str(folder.weights_file)
    else:
        assert all(
            lora.a.shape == (R, IN) and lora.b.shape == (OUT, R) for lora in modules.values()
        )


TEXT = st.text(
    "qvproj_01.*+?|()[]{}\\^$ \n\u00e9\ud800", max_size=8
)  # also pieces of regular expressions
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {*peft.REFUSED_KEYS, *peft.INERT_KEYS, *CONFIG, "rank_pattern", "alpha_pattern", "bias", "new"}
)


@settings(max_examples=300)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
@pytest.mark.filterwarnings(
    "default::FutureWarning"
)  # re's, for patterns that may change their meaning
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_any_configuration_is_honoured_or_refused(tmp_path_factory, changes):
    folder = Folder(tmp_path_factory.getbasetemp() / "changed_config").config(**changes)
    try:
        modules = folder.read().modules
    except PeftError as error:
        assert error.file in (str(folder.config_file), str(folder.weights_file))
    else:
        assert tuple(modules) == PATHS
        assert all(math.isfinite(lora.scaling) for lora in modules.values())


# Writing


def same(one, other):
    assert set(one) == set(other)
    for path in one:
        assert one[path].rank == other[path].rank
        assert one[path].a.dtype == other[path].a.dtype
        assert one[path].b.dtype == other[path].b.dtype
        np.testing.assert_array_equal(one[path].a, other[path].a)
        np.testing.assert_array_equal(one[path].b, other[path].b)


@pytest.mark.parametrize("name", REAL)
def test_real_adapters_survive_writing_and_reading(tmp_path, name):
    read = read_adapter(DATA / name)
    write_adapter(tmp_path / "copy", read.modules, base_model_name_or_path="a/base")
    again = read_adapter(tmp_path / "copy")
    same(read.modules, again.modules)
    assert [lora.scaling for lora in again.modules.values()] == [
        lora.scaling for lora in read.modules.values()
    ]
    assert again.config["base_model_name_or_path"] == "a/base"
    assert load_file(tmp_path / "copy" / "adapter_model.safetensors").keys() == (
        load_file(DATA / name / "adapter_model.safetensors").keys()
    )


def test_what_is_written(tmp_path):
    target = tmp_path / "new" / "folder"
    write_adapter(
        target,
        {
            "model.layers.0.q_proj": weights(8, 2.0),
            "model.layers.1.q_proj": weights(8, 2.0),
            "model.layers.0.v_proj": weights(4, 2.0),
            "model.layers.1.v_proj": weights(8, 0.5),
            "model.layers.0.o.proj": weights(2, 8.0),
        },
        task_type="CAUSAL_LM",
    )
    assert sorted(path.name for path in target.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((target / "adapter_config.json").read_text()) == {
        "alpha_pattern": {r"^model\.layers\.0\.v_proj": 8, r"^model\.layers\.1\.v_proj": 4},
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 8,
        "rank_pattern": {r"^model\.layers\.0\.v_proj": 4, "proj": 2},
        "target_modules": [
            "model.layers.0.o.proj",
            "model.layers.0.q_proj",
            "model.layers.0.v_proj",
            "model.layers.1.q_proj",
            "model.layers.1.v_proj",
        ],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def test_patterns_do_not_reach_modules_whose_paths_end_alike(tmp_path):
    modules = {
        "0.q": weights(4),
        "block.0.q": weights(8),
        "block.1.q": weights(4),
        "block.0xq": weights(4),
    }
    write_adapter(tmp_path, modules)
    same(modules, read_adapter(tmp_path).modules)


@settings(max_examples=200)
@given(
    rank=st.integers(1, 256),
    scaling=st.floats(-1e6, 1e6)
    | st.sampled_from([1 / 3, 0.1, 0.0, -0.0, 16 / math.sqrt(12), 1e-30, 1e30]),
)
def test_the_scaling_comes_back(tmp_path_factory, rank, scaling):
    folder = tmp_path_factory.getbasetemp() / "scaling"
    write_adapter(folder, {"q": weights(rank, scaling)})
    again = read_adapter(folder).modules["q"].scaling
    if rank & (rank - 1) == 0 and (scaling == 0 or abs(scaling) > 1e-300):
        assert again == scaling
    assert np.float32(again) == np.float32(scaling)
    assert again == pytest.approx(scaling, rel=2**-52, abs=5e-324)


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.lists(
            st.sampled_from(["a", "b", "0", "1", "q_proj", "a+b", "(", "$"]), min_size=1, max_size=4
        ).map(".".join),
        st.tuples(
            st.integers(1, 5), st.sampled_from([0.5, 1.0, 2.0, 1 / 3]), st.sampled_from(DTYPES)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_modules_come_back(tmp_path_factory, parts):
    folder = tmp_path_factory.getbasetemp() / "modules"
    modules = {
        path: weights(*values, seed=seed) for seed, (path, values) in enumerate(parts.items())
    }
    write_adapter(folder, modules)
    again = read_adapter(folder).modules
    same(modules, again)
    for path, lora in modules.items():
        assert np.float32(again[path].scaling) == np.float32(lora.scaling)


def test_arrays_that_are_not_contiguous(tmp_path):
    lora = weights()
    transposed = LoraWeights(np.asfortranarray(lora.a), np.asfortranarray(lora.b), 1.0, R)
    write_adapter(tmp_path, {"q": transposed})
    same({"q": lora}, read_adapter(tmp_path).modules)


def test_target_modules_of_ones_own(tmp_path):
    modules = {path: weights() for path in PATHS}
    write_adapter(tmp_path, modules, target_modules=("q_proj", "v_proj"))
    assert read_adapter(tmp_path).config["target_modules"] == ["q_proj", "v_proj"]
    write_adapter(tmp_path, modules, target_modules=r".*\.[qv]_proj")
    assert read_adapter(tmp_path).config["target_modules"] == r".*\.[qv]_proj"
    with pytest.raises(
        PeftError, match=r"target_modules: does not target the module model\.layers\.0\.v_proj"
    ):
        write_adapter(tmp_path, modules, target_modules=["q_proj"])


def test_a_folder_is_replaced(tmp_path):
    write_adapter(tmp_path, {path: weights() for path in PATHS})
    write_adapter(tmp_path, {"q": weights(2)})
    assert tuple(read_adapter(tmp_path).modules) == ("q",)
    assert len(list(tmp_path.iterdir())) == 2


BAD_WEIGHTS = {
    "rank too small": ({"rank": 0}, "rank: expected a positive integer, got 0"),
    "rank as text": ({"rank": "4"}, 'rank: expected a positive integer, got "4"'),
    "another rank": ({"rank": 3}, "a: expected [3, in], got [4, 6]"),
    "scaling NaN": ({"scaling": math.nan}, "scaling: expected a finite number, got NaN"),
    "scaling too large": ({"scaling": 1e308}, "scaling: expected a finite number, got 1e+308"),
    "scaling as text": ({"scaling": "1"}, 'scaling: expected a number, got "1"'),
    "a of ints": ({"a": np.ones((R, IN), np.int32)}, "a: expected an array of float32, float16, bfloat16, got int32"),
    "a of float64": ({"a": np.ones((R, IN))}, "a: expected an array of float32, float16, bfloat16, got float64"),
    "a a list": ({"a": [[1.0]]}, "a: expected an array of float32, float16, bfloat16, got list"),
    "a transposed": ({"a": np.ones((IN, R), np.float32)}, "a: expected [4, in], got [6, 4]"),
    "b transposed": ({"b": np.ones((R, OUT), np.float32)}, "b: expected [out, 4], got [4, 5]"),
    "b empty": ({"b": np.ones((0, R), np.float32)}, "b: expected [out, 4], got [0, 4]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_cannot_be_written(tmp_path, case):
    changes, reason = BAD_WEIGHTS[case]
    with pytest.raises(PeftError) as caught:
        write_adapter(
            tmp_path / "new", {"k": weights(), "q": dataclasses.replace(weights(), **changes)}
        )
    assert (caught.value.key, caught.value.reason) == ("q", reason)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ({}, "there is no module to write"),
        ({"": weights()}, "expected the path of a module"),
        ({3: weights()}, "expected the path of a module"),
        ({"q": (1, 2)}, "expected LoraWeights, got tuple"),
    ],
)
def test_modules_that_cannot_be_written(tmp_path, modules, reason):
    with pytest.raises(PeftError, match=reason):
        write_adapter(tmp_path / "new", modules)
    assert not (tmp_path / "new").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_adapter(tmp_path, {"q": weights()})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_adapter(tmp_path, {"v": weights(2)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# The module itself


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(peft).failed == 0


def test_errors_can_be_pickled():
    error = PeftError("file", "key", "reason")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.key) == ("file: key: reason", "key")


def test_mindspore_is_not_imported():
    code = "import sys, mindspore_addlora.peft; assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_key_has_one_treatment():
    assert not set(peft.INERT_KEYS) & set(peft.REFUSED_KEYS)
    assert not set(peft.REFUSED_KEYS) & set(CONFIG)
