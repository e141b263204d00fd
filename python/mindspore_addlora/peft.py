"""PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``, read and written without PEFT.

:func:`read_adapter` gives A, B and the scaling of every adapted module, and refuses, with the file, the key and the
reason, whatever A, B and a scaling cannot express. Nothing is guessed and nothing is left out silently. What a key of
the configuration means was taken from the source of PEFT 0.21.2.

==============================  ==================================================================================
key                             what is done with it
==============================  ==================================================================================
r, lora_alpha                   the rank, and scaling = lora_alpha / r (both 8 where they are missing, as in PEFT)
use_rslora                      scaling = lora_alpha / sqrt(r)
rank_pattern, alpha_pattern     r and lora_alpha of the modules whose path, or its end from a dot on, a key matches
                                as a regular expression; the first key that matches counts
target_modules                  a list of paths or ends of paths, a regular expression for the whole path, or
                                "all-linear"
exclude_modules                 likewise, and it wins over target_modules
layers_to_transform             the layers that the ends in target_modules stand for (whole paths are exempt)
layers_pattern                  the name of the list that those layers are in
bias                            only "none"
peft_type                       only "LORA"
init_lora_weights               true, false, null, "gaussian", "eva", "orthogonal" and "mica" say how training began,
                                which no longer matters. PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ subtract something
                                from the base weights each time PEFT loads the adapter: refused (PEFT converts such
                                an adapter with ``path_initial_model_for_weight_conversion``)
fan_in_fan_out                  either value: it says how the *base* weight lies in memory and turns only the product
                                that PEFT merges into it. A stays [r, in] and B [out, r]
the keys of ``INERT_KEYS``      ignored: they change nothing of what the adapter computes, for the reasons given there
the keys of ``REFUSED_KEYS``    refused when set, for the reasons given there
any other key                   refused when it is set to something true: nobody can say here what it does
==============================  ==================================================================================

Nothing in a folder is executed: a pickled ``adapter_model.bin`` is refused. Regular expressions are matched by Python's
``re``, and one written for the purpose can take very long: read folders of strangers with that in mind.

This module does not import MindSpore.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes  # safetensors reads bfloat16 for numpy only where this is imported
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

__all__ = [
    "CONFIG_FILE",
    "INERT_KEYS",
    "REFUSED_KEYS",
    "WEIGHTS_FILE",
    "LoraWeights",
    "PeftAdapter",
    "PeftError",
    "read_adapter",
    "targeted",
    "write_adapter",
]

Array = npt.NDArray[Any]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."

INERT_KEYS: Mapping[str, str] = {
    "auto_mapping": "how PEFT finds the class of the base model",
    "base_model_name_or_path": "the name of the base model",
    "corda_config": 'read only for init_lora_weights "corda", which is refused',
    "ensure_weight_tying": "acts only on adapted embeddings, whose tensors are refused",
    "eva_config": 'how init_lora_weights "eva" begins; ranks and alphas are in the patterns',
    "fan_in_fan_out": "how the base weight lies in memory; A and B are stored alike",
    "inference_mode": "whether PEFT freezes the adapter",
    "lora_dropout": "acts in training only",
    "lora_ga_config": 'read only for init_lora_weights "lora_ga", which is refused',
    "loftq_config": 'read only for init_lora_weights "loftq", which is refused',
    "megatron_config": "which parallel layers carry the adapter; the product is the same",
    "megatron_core": "the module that those layers come from",
    "merge_weights": "early PEFT: whether evaluation merges the product into the base weight",
    "peft_version": "who wrote the folder",
    "qalora_group_size": "read only with use_qalora, which is refused",
    "revision": "the revision of the base model",
    "runtime_config": "not kept by PEFT either",
    "task_type": "which class of PEFT wraps the model",
}
"""Keys that change nothing of what an adapter computes, and why."""

REFUSED_KEYS: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA adapts only the tokens after an invocation sequence",
    "arrow_config": "Arrow mixes several adapters by a router",
    "enable_lora": "adapts only some parts of a fused layer, with a layout of its own",
    "kasa_config": "KaSA changes the base weights and has a diagonal between A and B",
    "layer_replication": "the adapter belongs to a model whose layers are repeated",
    "lora_bias": "the adapter adds a bias, which A and B do not hold",
    "modules_to_save": "whole modules were trained and saved; they would replace base weights",
    "monteclora_config": "MonteCLoRA samples the adapter's weights",
    "target_parameters": "adapts bare parameters, not dense modules",
    "trainable_token_indices": "rows of the embedding were trained and saved",
    "use_bdlora": "block-diagonal LoRA stores its factors in blocks",
    "use_dora": "DoRA rescales the adapted weight by a magnitude, which A and B do not hold",
    "use_qalora": "QA-LoRA pools the input before A",
    "velora_config": "VeLoRA saves more than A and B",
}
"""Keys that are refused when set, and why."""

# PEFT tests these for truth; the other refused keys are on as soon as they are not null, an empty value included.
_OFF_WHEN_EMPTY = frozenset(
    {"enable_lora", "layer_replication", "modules_to_save", "target_parameters"}
)

_HONOURED_KEYS = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)

_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

# PEFT writes no adapter name; a state dict that somebody saved as it was has one.
_TENSOR_NAME = re.compile(
    rf"(?:{re.escape(_PREFIX)})?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight",
    re.DOTALL,
)


class PeftError(ValueError):
    """A PEFT folder that cannot be honoured exactly.

    Args:
        file (str): The file at fault.
        key (str): The key of the configuration, the tensor or the module at fault; empty where it is the whole file.
        reason (str): What is wrong with it.

    Examples:
        >>> from mindspore_addlora.peft import PeftError
        >>> print(PeftError("legal/adapter_config.json", "r", "expected a positive integer, got 0"))
        legal/adapter_config.json: r: expected a positive integer, got 0
    """

    def __init__(self, file: str, key: str, reason: str) -> None:
        super().__init__(file, key, reason)
        self.file = file
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.key, self.reason) if part)


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """The adapter of one module: it adds ``scaling * (x @ a.T) @ b.T``.

    Args:
        a (numpy.ndarray): A, [rank, in].
        b (numpy.ndarray): B, [out, rank], without the scaling.
        scaling (float): The factor of the product.
        rank (int): The rank.
    """

    a: Array
    b: Array
    scaling: float
    rank: int


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """What a PEFT folder holds.

    Args:
        path (str): The folder.
        config (Mapping[str, Any]): ``adapter_config.json`` as it is.
        modules (Mapping[str, LoraWeights]): The adapted modules by their path in the model, sorted.
    """

    path: str
    config: Mapping[str, Any]
    modules: Mapping[str, LoraWeights]


def read_adapter(folder: str | os.PathLike[str], *, max_rank: int | None = None) -> PeftAdapter:
    """Reads a PEFT folder.

    Tensors are float32, float16 or bfloat16 (``ml_dtypes.bfloat16``) and stay what they are.

    Args:
        folder (Union[str, os.PathLike]): The folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        max_rank (int, optional): The highest rank that is accepted. Default: ``None``, any.

    Returns:
        PeftAdapter, the configuration and the weights of each module.

    Raises:
        TypeError: `max_rank` is not an integer.
        ValueError: `max_rank` is below 1.
        PeftError: The folder cannot be honoured exactly: the message names the file, the key and the reason.
        OSError: A file is missing or cannot be read.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from mindspore_addlora import peft
        >>> folder = tempfile.mkdtemp()
        >>> weights = peft.LoraWeights(np.ones((2, 8), np.float32), np.ones((4, 2), np.float32), 0.5, 2)
        >>> peft.write_adapter(folder, {"layers.0.q_proj": weights})
        >>> adapter = peft.read_adapter(folder, max_rank=16)
        >>> for path, lora in adapter.modules.items():
        ...     print(path, lora.a.shape, lora.b.shape, lora.scaling)
        layers.0.q_proj (2, 8) (4, 2) 0.5
    """
    if max_rank is not None:
        if isinstance(max_rank, bool) or not isinstance(max_rank, int):
            raise TypeError(f"max_rank: expected an integer, got {type(max_rank).__name__}")
        if max_rank < 1:
            raise ValueError(f"max_rank: expected at least 1, got {max_rank}")
    folder = os.fspath(folder)
    config_file = os.path.join(folder, CONFIG_FILE)
    raw_config = _read_json(config_file)
    config = _Config(config_file, raw_config)
    modules = _read_modules(_weights_file(folder), config, max_rank)
    return PeftAdapter(folder, raw_config, modules)


def targeted(config: Mapping[str, Any], module_paths: Iterable[str]) -> list[str]:
    """Which of a model's modules a configuration targets, as PEFT decides it.

    Give the paths of the modules that can carry an adapter: the dense ones. For "all-linear" PEFT leaves the output
    layer of a language model out (and a classification head): leave it out of `module_paths` too.

    Args:
        config (Mapping[str, Any]): The configuration, as in ``PeftAdapter.config``.
        module_paths (Iterable[str]): Paths such as ``"model.layers.0.self_attn.q_proj"``.

    Returns:
        list[str], those that are targeted, in the order given.

    Raises:
        PeftError: target_modules, exclude_modules, layers_to_transform or layers_pattern cannot be understood.

    Examples:
        >>> from mindspore_addlora import peft
        >>> paths = ["model.layers.0.q_proj", "model.layers.0.k_proj", "model.layers.1.q_proj"]
        >>> peft.targeted({"target_modules": ["q_proj"], "layers_to_transform": [1]}, paths)
        ['model.layers.1.q_proj']
        >>> peft.targeted({"target_modules": r".*\\.0\\..*"}, paths)
        ['model.layers.0.q_proj', 'model.layers.0.k_proj']
    """
    targets = _Targets(CONFIG_FILE, config)
    return [path for path in module_paths if targets.match(path)]


def write_adapter(
    folder: str | os.PathLike[str],
    modules: Mapping[str, LoraWeights],
    *,
    base_model_name_or_path: str | None = None,
    target_modules: Sequence[str] | str | None = None,
    task_type: str | None = None,
) -> None:
    """Writes a folder that PEFT can load.

    A and B are stored as they are, and each module's scaling as lora_alpha / r: r and lora_alpha are those that most
    modules have, rank_pattern and alpha_pattern say the others'. B must therefore not contain the scaling: weights
    that do contain it have the scaling 1.

    lora_alpha is chosen so that lora_alpha / r is the scaling to the last bit. Where no float64 does that, which
    takes a rank that is not a power of two, it is the scaling to the last bit of float32, in which PEFT multiplies.

    The folder is made where it is missing; files in it that have the same names are replaced.

    Args:
        folder (Union[str, os.PathLike]): The folder to write.
        modules (Mapping[str, LoraWeights]): The weights of each module, by its path in the model. float32, float16
            or bfloat16.
        base_model_name_or_path (str, optional): The base model's name, for the configuration. Default: ``None``.
        target_modules (Union[Sequence[str], str], optional): What to write as target_modules. Default: ``None``, the
            path of every module. What is given must target every module.
        task_type (str, optional): PEFT's task type, such as "CAUSAL_LM". Default: ``None``.

    Raises:
        PeftError: The weights cannot be written: the message names the file, the module and the reason. Nothing was
            written.
        OSError: The folder or a file cannot be written.

    Examples:
        >>> import json, os, tempfile
        >>> import numpy as np
        >>> from mindspore_addlora import peft
        >>> folder = tempfile.mkdtemp()
        >>> def weights(rank, scaling):
        ...     return peft.LoraWeights(np.ones((rank, 8), np.float32), np.ones((4, rank), np.float32), scaling, rank)
        >>> peft.write_adapter(folder, {"0.q": weights(4, 2.0), "0.v": weights(8, 2.0), "1.q": weights(4, 2.0)})
        >>> with open(os.path.join(folder, "adapter_config.json")) as file:
        ...     config = json.load(file)
        >>> print(config["r"], config["lora_alpha"], config["rank_pattern"], config["alpha_pattern"])
        4 8 {'v': 8} {'v': 16}
    """
    folder = os.fspath(folder)
    config_file = os.path.join(folder, CONFIG_FILE)
    weights_file = os.path.join(folder, WEIGHTS_FILE)
    if not modules:
        raise PeftError(weights_file, "", "there is no module to write")
    for path, weights in modules.items():
        _check_weights(weights_file, path, weights)

    paths = sorted(modules)
    ranks = {path: modules[path].rank for path in paths}
    alphas = {path: _alpha_for(modules[path].scaling, modules[path].rank) for path in paths}
    rank, rank_pattern = _default_and_pattern(ranks)
    alpha, alpha_pattern = _default_and_pattern(alphas)
    if target_modules is None:
        target_modules = paths
    config: dict[str, Any] = {
        "alpha_pattern": alpha_pattern,
        "base_model_name_or_path": base_model_name_or_path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": rank_pattern,
        "target_modules": target_modules
        if isinstance(target_modules, str)
        else list(target_modules),
        "task_type": task_type,
        "use_dora": False,
        "use_rslora": False,
    }

    # What is about to be written is read the way it will be read back.
    written = _Config(config_file, config)
    for path in paths:
        if not written.targets.match(path):
            raise PeftError(config_file, "target_modules", f"does not target the module {path}")
        if written.rank(path) != ranks[path] or not _same_scaling(
            written.scaling(path), modules[path].scaling
        ):
            raise PeftError(config_file, path, "no pattern expresses its rank and scaling")

    tensors = {}
    for path in paths:
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = np.ascontiguousarray(
            _as_ml_dtypes(modules[path].a)
        )
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = np.ascontiguousarray(
            _as_ml_dtypes(modules[path].b)
        )
    config_text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n"
    os.makedirs(folder, exist_ok=True)
    _replace_file(weights_file, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    _replace_file(config_file, config_text.encode())


# The configuration


class _Config:
    """A configuration that was checked as a whole."""

    def __init__(self, file: str, config: Mapping[str, Any]) -> None:
        self._file = file
        if "peft_type" not in config:
            self._refuse("peft_type", 'missing; it must be "LORA"')
        if config["peft_type"] != "LORA":
            self._refuse(
                "peft_type", f'only "LORA" can be honoured, not {_show(config["peft_type"])}'
            )
        for key, reason in REFUSED_KEYS.items():
            value = config.get(key)
            off = value is None or value is False or (key in _OFF_WHEN_EMPTY and value == [])
            if not off:
                self._refuse(key, f"cannot be honoured: {reason} (it is set to {_show(value)})")
        for key, value in config.items():
            if (
                value
                and key not in _HONOURED_KEYS
                and key not in INERT_KEYS
                and key not in REFUSED_KEYS
            ):
                self._refuse(
                    key,
                    f"unknown, and set to {_show(value)}: whether it changes the result cannot be told (if it does "
                    "not, remove it from the file)",
                )
        if config.get("bias", "none") != "none":
            self._refuse(
                "bias",
                f'only "none" can be honoured, not {_show(config["bias"])}: biases were trained',
            )
        self._check_init(config.get("init_lora_weights"))

        self._rslora = self._bool("use_rslora", config.get("use_rslora"))
        self._bool("fan_in_fan_out", config.get("fan_in_fan_out"))
        self._rank = self._positive("r", config.get("r", _DEFAULT_RANK))
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", _DEFAULT_ALPHA))
        self._rank_pattern = [
            (pattern, self._positive(key, value))
            for pattern, key, value in self._pattern("rank_pattern", config)
        ]
        self._alpha_pattern = [
            (pattern, self._number(key, value))
            for pattern, key, value in self._pattern("alpha_pattern", config)
        ]
        self.targets = _Targets(file, config)

    def rank(self, path: str) -> int:
        return next(
            (rank for pattern, rank in self._rank_pattern if pattern.match(path)), self._rank
        )

    def scaling(self, path: str) -> float:
        alpha = next(
            (alpha for pattern, alpha in self._alpha_pattern if pattern.match(path)), self._alpha
        )
        rank = self.rank(path)
        return alpha / math.sqrt(rank) if self._rslora else alpha / rank

    def _refuse(self, key: str, reason: str) -> NoReturn:
        raise PeftError(self._file, key, reason)

    def _check_init(self, value: Any) -> None:
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, str) and (
            value in ("eva", "orthogonal") or value.lower() in ("gaussian", "mica")
        ):
            return
        changes_base = isinstance(value, str) and (
            value.startswith(("pissa", "corda"))
            or value.lower() == "olora"
            or value in ("loftq", "lora_ga")
        )
        self._refuse(
            "init_lora_weights",
            f"{_show(value)} changes the base weights whenever PEFT loads the adapter (PEFT's save_pretrained "
            "converts it with path_initial_model_for_weight_conversion)"
            if changes_base
            else f"{_show(value)} is unknown: whether it changes the base weights cannot be told",
        )

    def _bool(self, key: str, value: Any) -> bool:
        if value is not None and not isinstance(value, bool):
            self._refuse(key, f"expected true or false, got {_show(value)}")
        return bool(value)

    def _positive(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(key, f"expected a positive integer, got {_show(value)}")
        return value

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            self._refuse(key, f"expected a finite number, got {_show(value)}")
        return value

    def _pattern(
        self, name: str, config: Mapping[str, Any]
    ) -> list[tuple[re.Pattern[str], str, Any]]:
        patterns = config.get(name)
        if patterns is None:
            return []
        if not isinstance(patterns, dict):
            self._refuse(name, f"expected an object, got {_show(patterns)}")
        compiled = []
        for pattern, value in patterns.items():
            key = f"{name}[{_show(pattern)}]"
            # The pattern alone must be valid too: "a)(b" would be, between the parentheses that are put around it.
            _compile(self._file, key, pattern)
            compiled.append((_compile(self._file, key, rf"(.*\.)?({pattern})$"), key, value))
        return compiled


class _Targets:
    """Which modules a configuration targets; the rules are those of PEFT's check_target_module_exists."""

    def __init__(self, file: str, config: Mapping[str, Any]) -> None:
        targets = config.get("target_modules")
        if targets is None:
            raise PeftError(
                file,
                "target_modules",
                "missing: PEFT then chooses by the base model's type, which is not known here",
            )
        layers = config.get("layers_to_transform")
        layers_pattern = config.get("layers_pattern")
        self._targets = _Names(file, "target_modules", targets)
        self._excluded = _Names(file, "exclude_modules", config.get("exclude_modules") or [])
        self._all_linear = isinstance(targets, str) and targets.lower() == "all-linear"

        for key, value in (("layers_to_transform", layers), ("layers_pattern", layers_pattern)):
            if value is not None and isinstance(targets, str):
                raise PeftError(
                    file,
                    key,
                    f"cannot be used with a target_modules that is a string, {_show(targets)}",
                )
        if layers_pattern and layers is None:
            raise PeftError(file, "layers_pattern", "cannot be used without layers_to_transform")
        # An empty list means every layer, as in PEFT.
        self._layers = None if layers is None or layers == [] else _layer_numbers(file, layers)
        self._layer_index = [
            _compile(file, "layers_pattern", rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")
            for pattern in _layer_lists(file, layers_pattern)
        ] or [re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")]

    def match(self, path: str) -> bool:
        if self._excluded.match(path):
            return False
        if self._all_linear:
            return True
        if not self._targets.match(path):
            return False
        # A path that is targeted by its whole name is exempt from layers_to_transform.
        if self._layers is None or path in self._targets.names:
            return True
        found = next((m for m in (pattern.match(path) for pattern in self._layer_index) if m), None)
        if found is None:
            return False
        try:
            return int(found["idx"]) in self._layers
        except ValueError:  # Python converts no number of thousands of digits
            return False


class _Names:
    """A list of paths or ends of paths, or a regular expression for whole paths."""

    def __init__(self, file: str, key: str, value: Any) -> None:
        self.names: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        if isinstance(value, str):
            self._pattern = _compile(file, key, value)
        elif isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
            self.names = frozenset(value)
        else:
            raise PeftError(
                file, key, f"expected a list of strings or a string, got {_show(value)}"
            )
        self._ends = tuple(f".{name}" for name in self.names)

    def match(self, path: str) -> bool:
        if self._pattern is not None:
            return self._pattern.fullmatch(path) is not None
        return path in self.names or path.endswith(self._ends)


def _layer_numbers(file: str, layers: Any) -> frozenset[int]:
    numbers = layers if isinstance(layers, list) else [layers]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise PeftError(file, "layers_to_transform", f"expected integers, got {_show(layers)}")
    return frozenset(numbers)


def _layer_lists(file: str, patterns: Any) -> list[str]:
    if patterns is None or patterns == "":
        return []
    if isinstance(patterns, str):
        patterns = [patterns]
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise PeftError(
            file, "layers_pattern", f"expected a string or a list of strings, got {_show(patterns)}"
        )
    for pattern in patterns:
        _compile(file, "layers_pattern", pattern)
    return patterns


def _compile(file: str, key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PeftError(
            file, key, f"{_show(pattern)} is not a regular expression: {error}"
        ) from error


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _show(value: Any) -> str:
    """A value as JSON writes it, and not much of it."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = "a deeply nested value"
    return text if len(text) <= 60 else text[:57] + "..."


# The files


def _read_json(file: str) -> dict[str, Any]:
    with open(file, "rb") as stream:
        data = stream.read()
    try:
        config = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise PeftError(file, "", f"not JSON: {error}") from error
    if not isinstance(config, dict):
        raise PeftError(file, "", f"expected a JSON object, got {_show(config)}")
    return config


def _weights_file(folder: str) -> str:
    file = os.path.join(folder, WEIGHTS_FILE)
    pickled = os.path.join(folder, _PICKLE_FILE)
    if not os.path.exists(file) and os.path.exists(pickled):
        raise PeftError(
            pickled,
            "",
            "a pickle can run code when it is read, so it is not read. Convert it where you trust it: import torch, "
            f"safetensors.torch; safetensors.torch.save_file(torch.load({_PICKLE_FILE!r}, weights_only=True), "
            f"{WEIGHTS_FILE!r})",
        )
    with open(file, "rb"):  # safetensors' own OSError lacks errno and filename
        pass
    return file


def _read_modules(file: str, config: _Config, max_rank: int | None) -> dict[str, LoraWeights]:
    """Checks every name, dtype and shape in the header before it reads the first tensor."""
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            pairs = _pair_up(file, sorted(tensors.keys()))
            for path, (name_a, name_b) in pairs.items():
                if not config.targets.match(path):
                    raise PeftError(
                        file, name_a, f"{CONFIG_FILE} does not target the module {path}"
                    )
                shape_a, shape_b = _shape(file, name_a, tensors), _shape(file, name_b, tensors)
                _check_rank(file, config.rank(path), max_rank, name_a, shape_a, name_b, shape_b)
            return {
                path: LoraWeights(
                    _as_ml_dtypes(tensors.get_tensor(name_a)),
                    _as_ml_dtypes(tensors.get_tensor(name_b)),
                    config.scaling(path),
                    config.rank(path),
                )
                for path, (name_a, name_b) in pairs.items()
            }
    except safetensors.SafetensorError as error:
        raise PeftError(file, "", f"not a whole safetensors file: {error}") from error


def _pair_up(file: str, names: list[str]) -> dict[str, tuple[str, str]]:
    """The names of A and B of each module."""
    found: dict[str, dict[str, str]] = {}
    adapters = set()
    for name in names:
        parts = _TENSOR_NAME.fullmatch(name)
        if parts is None:
            raise PeftError(file, name, _why_surplus(name))
        adapters.add(parts["adapter"])
        sides = found.setdefault(parts["module"], {})
        if len(adapters) > 1 or parts["side"] in sides:
            raise PeftError(file, name, "the file holds the tensors of more than one adapter")
        sides[parts["side"]] = name
    if not found:
        raise PeftError(file, "", "there are no LoRA tensors in it")
    for path, sides in found.items():
        for side in "AB":
            if side not in sides:
                raise PeftError(file, path, f"lora_{side} is missing")
    return {path: (sides["A"], sides["B"]) for path, sides in sorted(found.items())}


def _why_surplus(name: str) -> str:
    if ".lora_embedding_" in name:
        return "an adapted embedding, which cannot be honoured: only dense modules can"
    if ".lora_magnitude_vector" in name:
        return f"a magnitude of DoRA, which cannot be honoured: {REFUSED_KEYS['use_dora']}"
    if re.search(r"\.lora_[AB](\.[^.]+)?\.bias$", name):
        return f"a bias of the adapter, which cannot be honoured: {REFUSED_KEYS['lora_bias']}"
    return "neither lora_A.weight nor lora_B.weight of a module: what else it stands for would be left out"


def _shape(file: str, name: str, tensors: Any) -> list[int]:
    piece = tensors.get_slice(name)
    dtype = piece.get_dtype()
    shape: list[int] = piece.get_shape()
    if dtype not in _FLOATS:
        raise PeftError(file, name, f"expected {', '.join(_FLOATS.values())}, got {dtype}")
    if len(shape) != 2 or 0 in shape:
        raise PeftError(file, name, f"expected a matrix, got the shape {shape}")
    return shape


def _as_ml_dtypes(array: Array) -> Array:
    """A bfloat16 array under the type of ml_dtypes.

    MindSpore registers a type of its own under the same name, which numpy then gives to safetensors, and which
    ``Tensor.asnumpy`` returns; the two do not compare equal.
    """
    foreign = array.dtype.name == "bfloat16" and array.dtype != ml_dtypes.bfloat16
    return array.view(ml_dtypes.bfloat16) if foreign else array


def _check_rank(
    file: str,
    rank: int,
    max_rank: int | None,
    name_a: str,
    shape_a: list[int],
    name_b: str,
    shape_b: list[int],
) -> None:
    if shape_a[0] != rank:
        raise PeftError(
            file, name_a, f"the rank of this module is {rank}: expected [{rank}, in], got {shape_a}"
        )
    if shape_b[1] != rank:
        raise PeftError(
            file,
            name_b,
            f"the rank of this module is {rank}: expected [out, {rank}], got {shape_b}",
        )
    if max_rank is not None and rank > max_rank:
        raise PeftError(
            file, name_a, f"the rank of this module is {rank}, above max_rank, which is {max_rank}"
        )


# Writing


def _check_weights(file: str, path: Any, weights: Any) -> None:
    if not isinstance(path, str) or not path:
        raise PeftError(file, _show(path), "expected the path of a module")
    if not isinstance(weights, LoraWeights):
        raise PeftError(file, path, f"expected LoraWeights, got {type(weights).__name__}")
    rank = weights.rank
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise PeftError(file, path, f"rank: expected a positive integer, got {_show(rank)}")
    if isinstance(weights.scaling, bool) or not isinstance(weights.scaling, (int, float)):
        raise PeftError(file, path, f"scaling: expected a number, got {_show(weights.scaling)}")
    if not _is_finite(weights.scaling) or not _is_finite(weights.scaling * rank):
        raise PeftError(
            file, path, f"scaling: expected a finite number, got {_show(weights.scaling)}"
        )
    for name, array, axis in (("a", weights.a, 0), ("b", weights.b, 1)):
        if not isinstance(array, np.ndarray) or _as_ml_dtypes(array).dtype not in _FLOAT_DTYPES:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise PeftError(
                file,
                path,
                f"{name}: expected an array of {', '.join(_FLOATS.values())}, got {kind}",
            )
        if array.ndim != 2 or 0 in array.shape or array.shape[axis] != rank:
            wanted = f"[{rank}, in]" if axis == 0 else f"[out, {rank}]"
            raise PeftError(file, path, f"{name}: expected {wanted}, got {list(array.shape)}")


def _alpha_for(scaling: float, rank: int) -> float:
    """The lora_alpha for which lora_alpha / rank is the scaling."""
    nearest = float(scaling) * rank
    candidates = (nearest, math.nextafter(nearest, -math.inf), math.nextafter(nearest, math.inf))
    for alike in (lambda a, b: bool(a == b), _same_scaling):
        for alpha in candidates:
            if alike(alpha / rank, float(scaling)):
                return int(alpha) if alpha.is_integer() else alpha
    return nearest


def _same_scaling(one: float, other: float) -> bool:
    """Whether two scalings are the same in float32, in which PEFT multiplies by them."""
    with np.errstate(over="ignore"):
        return bool(np.float32(one) == np.float32(other))


def _default_and_pattern(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """The value of most modules, and a pattern for each of the others."""
    default = Counter(values.values()).most_common(1)[0][0]
    by_end: dict[str, list[str]] = {}
    for path in values:
        by_end.setdefault(path.rpartition(".")[2], []).append(path)
    pattern: dict[str, float] = {}
    for end, paths in by_end.items():
        if len({values[path] for path in paths}) == 1:
            # One readable key, which every version of PEFT matches; no module has another of its keys.
            if values[paths[0]] != default:
                pattern[re.escape(end)] = values[paths[0]]
        else:
            # Anchored, because a key also matches the end of a longer path.
            pattern.update(
                {"^" + re.escape(path): values[path] for path in paths if values[path] != default}
            )
    return default, pattern


def _replace_file(file: str, data: bytes) -> None:
    """A reader sees the old file or the new one, never a part."""
    partial = f"{file}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as stream:
            stream.write(data)
        os.replace(partial, file)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise
