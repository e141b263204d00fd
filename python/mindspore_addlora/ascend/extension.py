"""The C++ half of the operator on Ascend: built against the installed MindSpore and CANN, once, at its first use.

An extension rather than ``ops.Custom``: it serves every mode, takes ``weight_a=None``, and copies y by itself, so that
nothing in a graph has to be made to depend on anything.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from pathlib import Path
from typing import Any

import mindspore
from mindspore import Tensor, ops
from mindspore.ops import signature
from mindspore.ops.primitive import Primitive

from .. import _core

_HERE = Path(__file__).resolve().parent
_SOURCES = ("eager_extension.cpp", "graph_definition.cpp", "graph_extension.cpp")


@functools.cache
def load() -> Any:
    """The extension's module, built where it is not yet (about half a minute); MindSpore keeps what it built.

    Raises:
        RuntimeError: The compiler or CANN's headers are missing, or the build failed.
    """
    if shutil.which("g++") is None:
        raise RuntimeError(
            "mindspore_addlora builds its operator for Ascend at the first use, and found no compiler: expected g++ on "
            "PATH (and CANN's headers under ASCEND_HOME_PATH)"
        )
    sources = [str(_HERE / name) for name in _SOURCES]
    try:
        builder = ops.CustomOpBuilder("mindspore_addlora_ascend", sources, backend="Ascend")
        module = builder.load().so_module
    except Exception as error:
        home = os.environ.get("ASCEND_HOME_PATH", "")
        raise RuntimeError(
            "mindspore_addlora could not build its operator for Ascend: expected CANN's headers under ASCEND_HOME_PATH "
            f'(now "{home}") and a g++ that MindSpore {mindspore.__version__} can be built against, got '
            f"{type(error).__name__}: {error}"
        ) from error
    rules = ctypes.CDLL(_core.__file__).AddLoraRefusal
    module.use_rules(ctypes.cast(rules, ctypes.c_void_p).value)
    return module


class _AddLora(Primitive):
    """What graph_definition.cpp registers; a graph needs the extension loaded before it meets this."""

    __mindspore_signature__ = (
        *(
            signature.make_sig(name)
            for name in (
                "y",
                "x",
                "weight_b",
                "indices",
                "layer_idx",
                "scale",
                "y_offset",
                "y_slice_size",
            )
        ),
        signature.make_sig("weight_a", default=None),
    )

    def __init__(self) -> None:
        super().__init__("Custom_add_lora")

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        weight_b: Tensor,
        indices: Tensor,
        layer_idx: int,
        scale: float,
        y_offset: int,
        y_slice_size: int,
        weight_a: Tensor | None = None,
    ) -> Tensor:
        # In PyNative only: a graph never gets here.
        return load().add_lora(
            y, x, weight_b, indices, layer_idx, scale, y_offset, y_slice_size, weight_a
        )


operator = _AddLora()
